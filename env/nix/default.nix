# Every output of the flake for one system, from a package set and the pin of env/nccl.toml.
{ pkgs, pin }:
let
  sources = import ./sources.nix;
  python = pkgs.python311;
  version = builtins.elemAt (builtins.match ''.*__version__ = "([^"]+)".*'' (
    builtins.readFile ../../miles_hpc/__init__.py
  )) 0;

  # What pyproject.toml asks for on a login node; a test compares the two lists.
  loginPackages = ps: [
    ps.pydantic
    ps.rich
    ps.submitit
    ps.tomli
    ps.typer
  ];
  testPackages = ps: [
    ps.hypothesis
    ps.jsonschema
    ps.mypy
    ps.packaging
    ps.psutil
    ps.pytest
    ps.pytest-timeout
  ];

  nccl = pkgs.callPackage ./nccl.nix { inherit pin; };
  launcher = pkgs.callPackage ./launcher.nix { inherit nccl; };
  miles-hpc = python.pkgs.callPackage ./package.nix {
    inherit version loginPackages;
    src = sources.package;
  };
  # The closure of a compute node, which lists itself: a job's nodes compare that list with the login node's.
  environment = pkgs.callPackage ./environment.nix {
    inherit launcher miles-hpc nccl;
    python = python.withPackages loginPackages;
  };
  image = pkgs.callPackage ./image.nix { inherit environment version; };
  shells = pkgs.callPackage ./shells.nix {
    inherit launcher miles-hpc nccl python;
  };
  demo = pkgs.callPackage ./demo.nix { inherit python launcher; };

  app = package: description: {
    type = "app";
    program = "${package}/bin/${package.meta.mainProgram}";
    meta = { inherit description; };
  };
in
{
  packages = {
    inherit environment image launcher miles-hpc nccl;
    default = miles-hpc;
  };
  apps = {
    miles-hpc = app miles-hpc "The miles-hpc command";
    default = app miles-hpc "The miles-hpc command";
    demo = app demo "jobs/demo.toml on this machine, from a checkout";
  };
  devShells = shells;
  checks = pkgs.callPackage ./checks.nix {
    inherit nccl pin miles-hpc;
    python = python.withPackages (ps: loginPackages ps ++ testPackages ps);
    src = sources.checkout;
  };
  formatter = pkgs.nixfmt;
}
