# `nix run .#demo`, in a checkout: the demo with Nix's Python and the locked packages in .venv-nix-cpu.
{
  writeShellScriptBin,
  python,
  launcher,
}:
writeShellScriptBin "miles-hpc-demo" ''
  set -eu
  if [ ! -x env/bootstrap.sh ]; then
    echo "error: found no env/bootstrap.sh in $PWD; expected a checkout of miles-hpc. Change into it." >&2
    exit 1
  fi
  export MILES_HPC_PYTHON=${python}/bin/python3 MILES_HPC_VENV="''${MILES_HPC_VENV:-$PWD/.venv-nix-cpu}"
  exec ${launcher}/bin/miles-hpc-run env/bootstrap.sh demo "$@"
''
// {
  meta.mainProgram = "miles-hpc-demo";
}
