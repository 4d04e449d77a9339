#!/usr/bin/env bash
# Set everything up and run it: one command for a first run, one for the tests. Needs Python 3.11 or 3.12 and a way to
# install Python packages; root is used (on Debian, for Slurm's and Chromium's own packages) where there is one, and never needed.
#
#   env/bootstrap.sh demo     the main job on this machine, without Slurm: jobs/demo.toml through the local cluster
#   env/bootstrap.sh test     lint, types, import contracts and every test this machine can run
#   env/bootstrap.sh venv     only the virtual environment with all of it
#   env/bootstrap.sh cpu      the same without the tools of the tests: what the demo needs
#   env/bootstrap.sh gpu      the same as cpu, with torch's build for CUDA whether or not this machine has a GPU
#   env/bootstrap.sh login    only a light virtual environment with the command line, as for a login node
#
# MILES_HPC_VENV names another place for the virtual environment (default: .venv, and .venv-login for `login`);
# MILES_HPC_PYTHON the Python that makes it. Packages come from env/requirements/*.txt by digest; what is in place is kept.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
LOCKS="$ROOT/env/requirements"
cd -- "$ROOT"

section() { printf '\n== %s\n' "$*"; }
say() { printf '   %s\n' "$*"; }
fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# --- Python -----------------------------------------------------------------------------------------------------------

is_usable_python() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${MILES_HPC_PYTHON:-}" ]; then
    is_usable_python "$MILES_HPC_PYTHON" || fail "MILES_HPC_PYTHON=$MILES_HPC_PYTHON is not Python 3.11 or 3.12 with venv."
    printf '%s\n' "$MILES_HPC_PYTHON"
    return
  fi
  for candidate in python3.11 python3.12 python3 python; do
    if have "$candidate" && is_usable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or 3.12 with the venv module is on PATH (looked for python3.11 python3.12 python3 python)." \
    "Install one (Debian 12: apt-get install python3 python3-venv) or name it: MILES_HPC_PYTHON=/path/to/python3.11"
}

# --- virtual environment ----------------------------------------------------------------------------------------------

pip_install() {
  "$VENV/bin/python" -m pip --disable-pip-version-check --no-input install \
    --quiet --quiet --progress-bar off --no-deps --no-build-isolation "$@"
}

# A CPU-only build (a tenth of the size) where pip can find the pinned one; else the index's, which is for CUDA.
install_torch() {
  if [ "${TORCH_BUILD:-}" != cuda ] && ! have nvidia-smi && pip_install --require-hashes -r "$LOCKS/torch-cpu.txt" >/dev/null 2>&1; then
    say "torch: CPU-only build"
    return
  fi
  say "torch: no CPU-only build of the pinned release is offered to pip (PIP_FIND_LINKS), or this machine has a GPU;"
  say "installing the index's build with its CUDA runtime, about 5 GB on disk"
  pip_install --require-hashes -r "$LOCKS/torch.txt"
  pip_install --require-hashes -r "$LOCKS/torch-cuda.txt"
}

install_group() {
  case $1 in
    torch) install_torch ;;
    # A plain path entry; the default is an import hook that costs every start of a command about 20 ms.
    package) pip_install --config-settings editable_mode=compat --editable . ;;
    *) pip_install --require-hashes -r "$LOCKS/$1.txt" ;;
  esac
}

stamp_of() {
  case $1 in
    torch) printf '%s' "${TORCH_BUILD:-}" && cat "$LOCKS"/torch*.txt ;;
    # The editable install holds the checkout's path and the metadata of pyproject.toml.
    package) printf '%s\n' "$ROOT" compat && cat pyproject.toml setup.py ;;
    *) cat "$LOCKS/$1.txt" ;;
  esac | sha256sum | cut -d' ' -f1
}

# ensure_venv GROUP...: bring the groups into $VENV, in this order (`login` first: it holds what builds the others).
ensure_venv() {
  local group stamp python
  if ! is_usable_python "$VENV/bin/python" || [ "$(cat "$VENV/.miles-hpc/place" 2>/dev/null)" != "$VENV" ]; then
    # A virtual environment cannot be moved: one that was copied here with the checkout is made again.
    if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ]; then
      fail "$VENV exists and is not a virtual environment. Move it away or set MILES_HPC_VENV."
    fi
    python=$(find_python)
    say "making $VENV with $("$python" --version) ($python)"
    "$python" -m venv --clear -- "$VENV"
    mkdir -- "$VENV/.miles-hpc"
    printf '%s\n' "$VENV" >"$VENV/.miles-hpc/place"
  fi
  for group in "$@"; do
    stamp=$(stamp_of "$group")
    if [ "$(cat "$VENV/.miles-hpc/$group" 2>/dev/null)" != "$stamp" ]; then
      say "installing: $group"
      install_group "$group"
      printf '%s\n' "$stamp" >"$VENV/.miles-hpc/$group"
    fi
  done
  say "ready: $VENV"
}

use_venv() { VENV=${MILES_HPC_VENV:-$ROOT/$1}; }

# --- system packages, for the tests -----------------------------------------------------------------------------------

SLURM_PACKAGES=(slurm-wlm munge iproute2)
BROWSER_PACKAGES=(chromium fonts-dejavu-core)
NIX_PACKAGES=(apt dpkg git unzip debian-archive-keyring)

missing_for_slurm() {
  local program missing=()
  for program in slurmctld slurmd sbatch munged ip; do
    PATH=$PATH:/usr/sbin:/sbin have "$program" || missing+=("$program")
  done
  printf '%s' "${missing[*]}"
}

# ensure GROUP MISSING PACKAGE...: install Debian's packages where the function MISSING names programs, this is root and there is apt.
ensure() {
  local group=$1 missing_for=$2 missing
  shift 2
  missing=$("$missing_for")
  if [ -z "$missing" ]; then
    say "ready for the $group group"
  elif [ "$(id -u)" -ne 0 ] || ! have apt-get; then
    say "not installed: $missing (this needs root on Debian; the $group group will not run)"
  else
    say "not installed: $missing; installing Debian's $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
    missing=$("$missing_for")
    [ -z "$missing" ] || fail "after apt-get install $* these are still missing: $missing"
  fi
}

NIX_FOLDER=$ROOT/.nix-debian

# Nix comes unpacked from Debian's packages and keeps its store in the tests' own folder: neither root nor /nix is needed.
missing_for_nix() {
  local program missing=()
  for program in apt-get dpkg-deb git unzip; do
    have "$program" || missing+=("$program")
  done
  [ -r /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
  printf '%s' "${missing[*]}"
}

run_nix_tests() {
  [ -e "$NIX_FOLDER/.unpacked" ] || env/nix/get-nix.sh "$NIX_FOLDER" || return 1
  "$@" tests/nix
}

missing_for_browser() { have chromium || have chromium-browser || have google-chrome || printf 'chromium'; }

# --- the test command -------------------------------------------------------------------------------------------------

PASSED=()
FAILED=()
NOT_RUN=()

# step NAME COMMAND...: run one check to its end, whatever the others did.
step() {
  local name=$1 started=$SECONDS
  shift
  section "$name"
  if "$@"; then
    PASSED+=("$name ($((SECONDS - started)) s)")
  else
    FAILED+=("$name (exit code $?, $((SECONDS - started)) s): $*")
  fi
}

not_run() {
  section "$1"
  say "not run: $2"
  NOT_RUN+=("$1: $2")
}

has_tests() { [ -n "$(find "$@" -name 'test_*.py' -print -quit 2>/dev/null)" ]; }

run_tests() {
  local py="$VENV/bin/python" missing gpus
  local pytest=("$py" -m pytest -q -ra)
  # The tests and what they start find the tools of this environment, and nothing reaches for a model hub.
  export PATH="$VENV/bin:$PATH:/usr/sbin:/sbin" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

  step "lint" "$py" -m ruff check .
  step "format" "$py" -m ruff format --check .
  step "types" "$py" -m mypy
  step "import contracts" "$VENV/bin/lint-imports"
  step "architecture" "${pytest[@]}" tests/architecture
  step "unit" "${pytest[@]}" tests/unit --ignore=tests/unit/trainer -m "not sglang"
  step "trainer" "${pytest[@]}" tests/unit/trainer -m "not sglang"
  step "flow" "${pytest[@]}" tests/flow

  missing=$(missing_for_slurm)
  if [ -z "$missing" ]; then
    step "slurm" "${pytest[@]}" tests/slurm
  elif [ -n "${CI:-}" ]; then
    FAILED+=("slurm: CI must be able to run it, and these are not installed: $missing")
  else
    not_run "slurm" "not installed: $missing. Debian: apt-get install --no-install-recommends ${SLURM_PACKAGES[*]}"
  fi

  missing=$(missing_for_browser)
  if [ -z "$missing" ]; then
    step "browser" "${pytest[@]}" tests/browser
  elif [ -n "${CI:-}" ]; then
    FAILED+=("browser: CI must be able to run it, and this is not installed: $missing")
  else
    not_run "browser" "not installed: $missing. Debian: apt-get install --no-install-recommends ${BROWSER_PACKAGES[*]}"
  fi

  missing=$(missing_for_nix)
  if [ -z "$missing" ]; then
    step "nix" run_nix_tests "${pytest[@]}"
  elif [ -n "${CI:-}" ]; then
    FAILED+=("nix: CI must be able to run it, and these are not installed: $missing")
  else
    not_run "nix" "not installed: $missing. It needs Debian: apt-get install ${NIX_PACKAGES[*]}"
  fi

  if ! has_tests tests/gpu; then
    not_run "gpu" "there is no GPU test yet"
  elif gpus=$(nvidia-smi --list-gpus 2>/dev/null) && [ -n "$gpus" ]; then
    step "gpu" "${pytest[@]}" tests/gpu
  else
    # Collecting still proves that each declares its hardware and imports nothing that a CPU machine lacks.
    step "gpu (collected only)" "${pytest[@]}" --collect-only tests/gpu
    not_run "gpu" "no NVIDIA GPU answers on this machine"
  fi

  if "$py" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("sglang") is None)'; then
    step "sglang" "${pytest[@]}" tests/unit -m sglang
  else
    not_run "sglang" "sglang is not installed (an optional tier, not in the locked requirements)"
  fi
}

report() {
  local line
  section "summary"
  for line in ${PASSED[@]+"${PASSED[@]}"}; do say "passed   $line"; done
  for line in ${NOT_RUN[@]+"${NOT_RUN[@]}"}; do say "not run  $line"; done
  for line in ${FAILED[@]+"${FAILED[@]}"}; do say "FAILED   $line"; done
  if [ ${#FAILED[@]} -ne 0 ]; then
    say "${#FAILED[@]} failed, ${#PASSED[@]} passed, ${#NOT_RUN[@]} not run, $SECONDS s"
    return 1
  fi
  say "all ${#PASSED[@]} steps passed, ${#NOT_RUN[@]} not run, $SECONDS s"
}

# --- commands ---------------------------------------------------------------------------------------------------------

usage() { sed -n '2,/^$/{s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

main() {
  case ${1:-} in
    demo)
      shift
      use_venv .venv
      section "set-up"
      ensure_venv login cpu torch package
      section "jobs/demo.toml on this machine"
      exec "$VENV/bin/python" -m miles_hpc submit jobs/demo.toml --cluster local --wait "$@"
      ;;
    test)
      [ $# -eq 1 ] || fail "\`test\` takes no arguments. For one group: .venv/bin/python -m pytest tests/unit"
      use_venv .venv
      section "set-up"
      ensure_venv login cpu torch test package
      ensure slurm missing_for_slurm "${SLURM_PACKAGES[@]}"
      ensure browser missing_for_browser "${BROWSER_PACKAGES[@]}"
      ensure nix missing_for_nix "${NIX_PACKAGES[@]}"
      run_tests
      report
      ;;
    venv)
      use_venv .venv
      ensure_venv login cpu torch test package
      ;;
    cpu | gpu)
      use_venv .venv
      [ "$1" = cpu ] || TORCH_BUILD=cuda
      ensure_venv login cpu torch package
      ;;
    login)
      use_venv .venv-login
      ensure_venv login package
      say "try: '$VENV/bin/miles-hpc' check jobs/demo.toml"
      ;;
    -h | --help | help) usage ;;
    *)
      usage >&2
      fail "expected one of: demo test venv cpu gpu login; found '${1:-}'"
      ;;
  esac
}

main "$@"
