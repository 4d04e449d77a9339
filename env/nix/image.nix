# The same environment as an OCI image, for nodes without Nix: `$(nix build --print-out-paths .#image) > image.tar`, then
# `enroot import` or `apptainer build` turns it into the one file that `[cluster] environment_path` names.
{
  dockerTools,
  bashInteractive,
  coreutils,
  environment,
  version,
}:
dockerTools.streamLayeredImage {
  name = "miles-hpc";
  tag = version;
  contents = [
    environment
    bashInteractive
    coreutils
  ];
  config = {
    Cmd = [ "${environment}/bin/miles-hpc" ];
    Env = [
      "PATH=${environment}/bin:${coreutils}/bin:${bashInteractive}/bin"
      "NVIDIA_VISIBLE_DEVICES=all"
      "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    ];
  };
}
