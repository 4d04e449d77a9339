# What a compute node gets with `[cluster] environment = "nix"`: Python, the command line, the launcher and NCCL in one store
# path. share/miles-hpc/closure lists every store path it needs, one a line and sorted; its digest goes into a job's handoff.
{
  closureInfo,
  runCommand,
  symlinkJoin,
  launcher,
  miles-hpc,
  nccl,
  python,
}:
let
  tree = symlinkJoin {
    name = "miles-hpc-environment-tree";
    paths = [
      python
      miles-hpc
      launcher
      nccl
    ];
  };
  closure = closureInfo { rootPaths = [ tree ]; };
in
runCommand "miles-hpc-environment" { } ''
  mkdir -p $out/share/miles-hpc
  for entry in bin lib include; do
    if [ -e ${tree}/$entry ]; then ln -s ${tree}/$entry $out/$entry; fi
  done
  LC_ALL=C sort ${closure}/store-paths > $out/share/miles-hpc/closure
''
