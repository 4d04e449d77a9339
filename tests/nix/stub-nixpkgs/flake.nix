{
  description = "A small stand-in for nixpkgs: what this project's flake calls of it, over the host's own tools";
  outputs = { self }: {
    lib = import ./lib.nix;
    legacyPackages = self.lib.genAttrs [ "x86_64-linux" "aarch64-linux" ] (system: import ./. { inherit system; });
  };
}
