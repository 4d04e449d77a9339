{
  description = "miles-hpc: one TOML job spec through a Slurm cluster to a post-trained large model";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-26.05";

  outputs =
    { nixpkgs, ... }:
    let
      pin = builtins.fromTOML (builtins.readFile ./env/nccl.toml);
      systems = map (machine: "${machine}-linux") (builtins.attrNames pin.wheel);
      partsOf = pkgs: import ./env/nix { inherit pkgs pin; };
      outputs = nixpkgs.lib.genAttrs systems (system: partsOf nixpkgs.legacyPackages.${system});
      each = name: builtins.mapAttrs (_system: parts: parts.${name}) outputs;
    in
    {
      packages = each "packages";
      apps = each "apps";
      devShells = each "devShells";
      checks = each "checks";
      formatter = each "formatter";
      overlays.default = final: _previous: {
        miles-hpc = (partsOf final).packages.miles-hpc;
        miles-hpc-nccl = (partsOf final).packages.nccl;
        miles-hpc-launcher = (partsOf final).packages.launcher;
      };
    };
}
