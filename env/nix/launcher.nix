# Two programs that start a program of Nix on a host which has its own GPU driver:
#
#   miles-hpc-run PROGRAM ARGUMENT...    with Nix's C++ runtime and the host's driver libraries on LD_LIBRARY_PATH
#   miles-hpc-rank PROGRAM ARGUMENT...   the same, and the pinned NCCL in LD_PRELOAD
#
# Both variables are set here for one process tree and never for a shell: host programs (srun) would find Nix's libraries and
# fail on an older C library, and Nix's own bash cannot open a preloaded NCCL without a libstdc++ on its path.
{
  lib,
  stdenv,
  symlinkJoin,
  writeShellScriptBin,
  nccl,
}:
let
  folders = lib.concatStringsSep " " [
    "/run/opengl-driver/lib"
    "/usr/lib/${stdenv.hostPlatform.parsed.cpu.name}-linux-gnu"
    "/usr/lib64"
    "/usr/lib"
    "/usr/local/nvidia/lib64"
  ];
  script = preload: ''
    set -eu
    # Only the driver's own files come from the host, each by a link: its folder also holds the host's C library.
    links="''${TMPDIR:-/tmp}/miles-hpc-driver-$(id -u)"
    mkdir -p -m 700 "$links"
    if [ -L "$links" ] || [ ! -O "$links" ]; then
      echo "error: $links: found a link or another user's folder; expected this user's own. Set TMPDIR to a private folder." >&2
      exit 1
    fi
    for library in libcuda.so.1 libnvidia-ml.so.1 libnvidia-ptxjitcompiler.so.1 libnvidia-nvvm.so.4 libnvidia-gpucomp.so; do
      for folder in ''${MILES_HPC_DRIVER_DIRS:-} ${folders}; do
        if [ -e "$folder/$library" ]; then
          ln -sfn "$folder/$library" "$links/$library"
          break
        fi
      done
    done
    export LD_LIBRARY_PATH="${lib.makeLibraryPath [ stdenv.cc.cc.lib ]}:$links''${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    ${preload}
    exec "$@"
  '';
in
symlinkJoin {
  name = "miles-hpc-launcher";
  paths = [
    (writeShellScriptBin "miles-hpc-run" (script ""))
    (writeShellScriptBin "miles-hpc-rank" (script ''export LD_PRELOAD="${nccl}/lib/libnccl.so.2''${LD_PRELOAD:+:$LD_PRELOAD}"''))
  ];
}
