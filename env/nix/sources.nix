# The parts of the checkout that a build depends on, so that editing a page of documentation rebuilds no package.
let
  root = ../..;
  prefix = builtins.stringLength (toString root) + 1;
  keep =
    names:
    builtins.path {
      path = root;
      name = "miles-hpc-source";
      filter =
        path: _type:
        let
          relative = builtins.substring prefix (builtins.stringLength path) path;
          top = builtins.head (builtins.split "/" relative);
        in
        builtins.elem top names && baseNameOf path != "__pycache__";
    };
  package = [
    "MANIFEST.in"
    "README.md"
    "env"
    "jobs"
    "miles_hpc"
    "pyproject.toml"
    "setup.py"
  ];
in
{
  package = keep package;
  checkout = keep (package ++ [ "docs" "tests" ]);
}
