# `nix flake check`: the same commands as the first steps of env/bootstrap.sh test, on the files of the checkout alone.
{
  git,
  ruff,
  runCommand,
  nccl,
  pin,
  python,
  miles-hpc,
  src,
}:
let
  check =
    name: tools: command:
    runCommand "check-${name}" { nativeBuildInputs = tools; } ''
      cp -r ${src} checkout
      chmod -R u+w checkout
      cd checkout
      export HOME=$PWD/.home
      mkdir $HOME
      ${command}
      touch $out
    '';
in
{
  inherit miles-hpc;
  lint = check "lint" [ ruff ] ''
    ruff check --no-cache miles_hpc env tests
    ruff format --no-cache --check miles_hpc env tests
  '';
  types = check "types" [ python ] "python3 -m mypy --cache-dir=$HOME/mypy";
  unit = check "unit" [ python git ] ''
    python3 -m pytest -q --basetemp="$NIX_BUILD_TOP/t" tests/unit/spec tests/unit/plan tests/unit/engine tests/unit/run
  '';
  pin = check "pin" [ nccl ] ''
    grep -q 'nvidia-nccl-cu13==${pin.version} ' env/requirements/cpu.txt
    for wheel in ${builtins.concatStringsSep " " (map (wheel: wheel.sha256) (builtins.attrValues pin.wheel))}; do
      grep -q "sha256:$wheel" env/requirements/cpu.txt
    done
    echo "${pin.wheel.${nccl.machine}.library_sha256}  ${nccl}/lib/libnccl.so.2" | sha256sum -c -
  '';
}
