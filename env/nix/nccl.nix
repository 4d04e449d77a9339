# NCCL out of NVIDIA's own wheel, byte for byte, in its own prefix. Neither stripped nor patched, on purpose: without a
# RUNPATH it binds to the C library of whichever process loads it, and its digest stays the one of env/nccl.toml.
{
  stdenvNoCC,
  fetchPypi,
  unzip,
  pin,
}:
let
  machine = stdenvNoCC.hostPlatform.parsed.cpu.name;
  wheel = pin.wheel.${machine} or (throw "miles-hpc: env/nccl.toml pins no NCCL wheel for ${machine}");
in
stdenvNoCC.mkDerivation {
  pname = "miles-hpc-nccl";
  inherit (pin) version;
  # The address follows from the name; the digest decides. A wheel that was added to the store by hand is taken as it is:
  # nix-store --add-fixed sha256 FILE
  src = fetchPypi {
    pname = builtins.replaceStrings [ "-" ] [ "_" ] pin.package;
    inherit (pin) version;
    format = "wheel";
    dist = "py3";
    python = "py3";
    abi = "none";
    platform = wheel.tag;
    hash = builtins.convertHash {
      hash = wheel.sha256;
      hashAlgo = "sha256";
      toHashFormat = "sri";
    };
  };
  nativeBuildInputs = [ unzip ];
  dontUnpack = true;
  dontConfigure = true;
  dontBuild = true;
  dontFixup = true;
  installPhase = ''
    mkdir -p $out/lib $out/share/licenses
    unzip -q $src -d wheel
    cp wheel/${pin.library} $out/lib/libnccl.so.2
    ln -s libnccl.so.2 $out/lib/libnccl.so
    cp -r wheel/nvidia/nccl/include $out/include
    cp -r wheel/*.dist-info $out/share/licenses/
  '';
  doInstallCheck = true;
  installCheckPhase = ''
    echo "${wheel.library_sha256}  $out/lib/libnccl.so.2" | sha256sum -c -
  '';
  passthru = { inherit machine; };
  meta = {
    description = "NCCL ${pin.version} from the pinned wheel";
    platforms = map (name: "${name}-linux") (builtins.attrNames pin.wheel);
  };
}
