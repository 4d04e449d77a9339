# The command line, as a login node needs it: no GPU library, no Ray.
{
  buildPythonApplication,
  setuptools,
  python,
  version,
  src,
  loginPackages,
}:
buildPythonApplication {
  pname = "miles-hpc";
  inherit version src;
  pyproject = true;
  build-system = [ setuptools ];
  dependencies = loginPackages python.pkgs;
  pythonImportsCheck = [ "miles_hpc" ];
  meta = {
    description = "One TOML job spec through a Slurm cluster to a post-trained large model";
    mainProgram = "miles-hpc";
  };
}
