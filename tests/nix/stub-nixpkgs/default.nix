# Every function has the arguments that nixpkgs' has, so far as this project uses them; what it builds is made of host tools.
{ system }:
let
  lib = import ./lib.nix;
  path = import ./host.nix;
  bash = "/bin/bash";

  # A builder ends in a shell builtin: coreutils close their output before they exit, and Nix ends a builder whose output
  # has closed, so a last command that bash replaced itself with would race with that.
  end = "\nexit 0";
  setup = builtins.toFile "setup" ''
    export PATH=${path}
    for package in $packages $nativeBuildInputs $buildInputs; do
      if [ -d "$package/bin" ]; then PATH="$package/bin:$PATH"; fi
    done
    runHook() { :; }
  '';
  stdenv =
    derivation {
      name = "stub-stdenv";
      inherit system;
      builder = bash;
      PATH = path;
      args = [ "-e" "-c" "mkdir -p $out; cp ${setup} $out/setup${end}" ];
    }
    // {
      hostPlatform = { inherit system; parsed.cpu.name = builtins.head (builtins.split "-" system); };
      cc.cc.lib = tool "true";
    };
  make = args: derivation ({ inherit system; builder = bash; stdenv = "${stdenv}"; PATH = path; } // args);
  run = script: [ "-e" (builtins.toFile "builder.sh" "source $stdenv/setup\ncd \"$(mktemp -d)\"\n${script}${end}") ];
  # A string context may not stand in toFile, so such a script travels as a variable.
  runWithContext = name: attributes: script:
    make (attributes // { inherit name script; args = run "eval \"$script\""; });

  tool = name: runWithContext name { } ''
    mkdir -p $out/bin
    ln -s "$(type -P ${name} || type -P false)" $out/bin/${name}
  '';
  mkDerivation = a:
    make (removeAttrs a [ "meta" "passthru" "pname" "version" ] // {
      name = a.name or "${a.pname}-${a.version}";
      args = run ''
        eval "$installPhase"
        if [ -n "''${doInstallCheck:-}" ]; then eval "$installCheckPhase"; fi
      '';
    })
    // (a.passthru or { })
    // { inherit (a) meta; };

  pythonPackages = lib.genAttrs [
    "hypothesis" "jsonschema" "mypy" "packaging" "psutil" "pydantic" "pytest" "pytest-timeout"
    "rich" "setuptools" "submitit" "tomli" "typer"
  ] tool // {
    python = python311;
    callPackage = callWith (self // pythonPackages);
    buildPythonApplication = a:
      runWithContext "${a.pname}-${a.version}" { inherit (a) src; wants = a.dependencies ++ a.build-system; } ''
        mkdir -p $out/bin
        cp -r $src $out/checkout
        printf '#!/bin/bash\nPYTHONPATH=%s exec %s -m miles_hpc "$@"\n' $out/checkout "$(type -P python3)" > $out/bin/miles-hpc
        chmod +x $out/bin/miles-hpc
      ''
      // { inherit (a) meta; };
  };
  python311 = {
    pkgs = pythonPackages;
    outPath = "${pythonEnv [ ]}";
    withPackages = f: pythonEnv (f pythonPackages);
  };
  # A link would make Python look for its library beside the store path; this starts the host's where it lies.
  pythonEnv = wants:
    runWithContext "stub-python" { inherit wants; } ''
      mkdir -p $out/bin
      for name in python3 python; do
        printf '#!/bin/bash\nexec %s "$@"\n' "$(type -P python3)" > $out/bin/$name
        chmod +x $out/bin/$name
      done
    '';

  callWith = scope: f: args:
    let function = if builtins.isFunction f then f else import f;
    in function (builtins.intersectAttrs (builtins.functionArgs function) scope // args);

  self = {
    inherit lib stdenv python311;
    stdenvNoCC = stdenv // { inherit mkDerivation; };
    callPackage = callWith self;
    mkShell = a: make ({ name = "nix-shell"; outputs = [ "out" ]; args = run "exit 1"; } // a);
    runCommand = name: attributes: script: runWithContext name attributes script;
    writeShellScriptBin = name: text:
      make {
        inherit name text;
        passAsFile = [ "text" ];
        args = run ''
          mkdir -p $out/bin
          { echo '#!/bin/bash'; cat "$textPath"; } > $out/bin/${name}
          chmod +x $out/bin/${name}
        '';
      };
    symlinkJoin = { name, paths }:
      runWithContext name { inherit paths; } ''
        mkdir -p $out
        for path in $paths; do
          if [ -d $path ]; then cp -rs --no-preserve=mode $path/. $out/; fi
        done
      '';
    # As in nixpkgs, the list comes from Nix itself, by an attribute that only structured derivations have.
    closureInfo = { rootPaths }:
      derivation {
        name = "closure-info";
        inherit system;
        builder = bash;
        __structuredAttrs = true;
        exportReferencesGraph.closure = rootPaths;
        python = "${pythonEnv [ ]}";
        PATH = path;
        args = [ "-e" "-c" ''
          source "$NIX_ATTRS_SH_FILE"
          export PATH
          out=''${outputs[out]}
          mkdir -p $out
          $python/bin/python3 -c 'import json,sys; print("\n".join(e["path"] for e in json.load(open(sys.argv[1]))["closure"]))' \
            "$NIX_ATTRS_JSON_FILE" > $out/store-paths${end}'' ];
      };
    # The path of a fixed output depends on its name and hash alone: a wheel added beforehand needs no fetch, here or with
    # the real one.
    fetchPypi = { pname, version, format, dist, python, abi, platform, hash }:
      assert format == "wheel" && dist == python;
      derivation {
        name = "${pname}-${version}-${python}-${abi}-${platform}.whl";
        inherit system;
        builder = bash;
        args = [ "-c" "echo 'the stub fetches nothing: add the wheel to the store first' >&2; exit 1" ];
        outputHashMode = "flat";
        outputHashAlgo = null;
        outputHash = hash;
      };
    dockerTools.streamLayeredImage = { name, tag, contents, config }:
      runWithContext "stream-${name}-${tag}" { inherit contents; configuration = builtins.toJSON config; } ''
        printf '%s\n' "$configuration" > $out
      '';
  }
  // lib.genAttrs [ "bashInteractive" "coreutils" "git" "nixfmt" "ruff" "slurm" "unzip" "uv" ] (name: tool (
    { bashInteractive = "bash"; coreutils = "ls"; slurm = "true"; }.${name} or name
  ));
in
self
