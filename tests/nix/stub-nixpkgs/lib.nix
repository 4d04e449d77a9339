{
  genAttrs = names: f: builtins.listToAttrs (map (name: { inherit name; value = f name; }) names);
  concatStringsSep = builtins.concatStringsSep;
  makeLibraryPath = packages: builtins.concatStringsSep ":" (map (package: "${package}/lib") packages);
}
