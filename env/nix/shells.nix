# Development shells. `login` (the default) holds the command line alone; `cpu` and `gpu` add what a node needs, from the
# locked requirements, in a virtual environment of Nix's Python (.venv-nix-cpu or -gpu in the checkout). No shell ever has LD_PRELOAD or
# LD_LIBRARY_PATH of ours: see launcher.nix.
{
  git,
  mkShell,
  slurm,
  uv,
  writeShellScriptBin,
  launcher,
  miles-hpc,
  nccl,
  python,
}:
let
  # The site's Slurm comes first on PATH, since a client must not be newer than the site's slurmctld; Nix's is for want of one.
  common = ''
    export PYTHONNOUSERSITE=1
    export PATH="$PATH:${slurm}/bin"
  '';
  # Nix's Python finds the wheels' C++ runtime and the GPU driver through the launcher; so does all that it starts.
  inVenv = writeShellScriptBin "miles-hpc" ''
    exec ${launcher}/bin/miles-hpc-run "''${MILES_HPC_VENV:?}/bin/miles-hpc" "$@"
  '';
  stack =
    kind:
    mkShell {
      name = "miles-hpc-${kind}";
      packages = [
        git
        inVenv
        launcher
        python
        uv
      ];
      MILES_HPC_NCCL = "${nccl}/lib/libnccl.so.2";
      shellHook = common + ''
        export MILES_HPC_PYTHON=${python}/bin/python3 MILES_HPC_VENV="''${MILES_HPC_VENV:-$PWD/.venv-nix-${kind}}"
        if [ ! -x env/bootstrap.sh ]; then
          echo "error: found no env/bootstrap.sh in $PWD; expected a checkout of miles-hpc. Change into it." >&2
          exit 1
        fi
        env/bootstrap.sh ${kind} >&2 || exit 1
      '';
    };
in
rec {
  login = mkShell {
    name = "miles-hpc-login";
    packages = [
      git
      miles-hpc
    ];
    shellHook = common;
  };
  cpu = stack "cpu";
  gpu = stack "gpu";
  default = login;
}
