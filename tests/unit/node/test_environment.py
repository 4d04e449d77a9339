"""What Ray's processes and the driver get, and what of the user's shell they do not."""

from dataclasses import replace
from pathlib import Path

from miles_hpc.handoff import SecretSource, Variable
from miles_hpc.node.environment import driver_environment, fill_placeholders, node_environment
from miles_hpc.node.network import Interface
from miles_hpc.paths import RunDir
from miles_hpc.probe.nccl_hook import PYTHON_START


def environment(context, base, nccl="/x/libnccl.so.2"):
    return node_environment(
        context,
        base,
        scratch=Path("/nvme/job"),
        temp=Path("/tmp/t"),
        nccl=None if nccl is None else Path(nccl),
        interface=Interface(name="eth7", address="10.0.0.1"),
    )


def test_settings_of_a_foreign_ray_or_python_do_not_get_in(make_context):
    base = {
        "PATH": "/bin",
        "RAY_ADDRESS": "10.9.9.9:6379",
        "RAY_AUTH_TOKEN": "foreign",
        "RAY_RUNTIME_ENV_HOOK": "evil.hook",
        "LD_PRELOAD": "/old/libnccl.so.2",
        "PYTHONPATH": "/home/me",
        "PYTHONHOME": "/home/me",
        "MILES_HPC_SCRATCH": "/of/an/outer/job",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    environ = environment(make_context(), base)
    assert environ["PATH"] == "/bin"
    assert environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environ["PYTHONPATH"] == f"{PYTHON_START}:/frozen"
    assert environ["MILES_HPC_SCRATCH"] == "/nvme/job"
    absent = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_RUNTIME_ENV_HOOK", "LD_PRELOAD", "PYTHONHOME")
    assert not set(absent) & set(environ)


def test_what_the_site_preloads_stays_without_another_nccl(make_context):
    base = {"LD_PRELOAD": "/opt/libxalt.so:/old/libnccl.so.2 /opt/libjemalloc.so"}
    environ = environment(make_context(), base)
    assert environ["LD_PRELOAD"] == "/opt/libxalt.so:/opt/libjemalloc.so"
    assert environ["MILES_HPC_NCCL"] == "/x/libnccl.so.2"


def test_the_submitting_shells_settings_do_not_get_in_but_the_specs_do(make_context):
    names = (
        "http_proxy",
        "NO_PROXY",
        "CONDA_PREFIX",
        "VIRTUAL_ENV",
        "PYTHONWARNINGS",
        "SBATCH_X",
        "SLURM_MEM_PER_CPU",
    )
    base = {**dict.fromkeys(names, "leaked"), "SLURM_JOB_ID": "7"}
    context = make_context(environment=(Variable(name="http_proxy", value="http://wanted"),))
    environ = environment(context, base)
    assert environ["http_proxy"] == "http://wanted"
    assert environ["SLURM_JOB_ID"] == "7"
    assert "leaked" not in environ.values()


def test_a_secret_reaches_the_driver_and_not_ray(make_context):
    source = SecretSource(names=("MINE",), path="/nowhere", is_stored=False)
    context = make_context(secrets=source)
    ray = environment(context, {"MINE": "of the shell"})
    assert "MINE" not in ray
    assert driver_environment(context, ray, "10.0.0.1:6379", {"MINE": "v"})["MINE"] == "v"


def test_the_token_travels_as_a_path(make_context):
    context = make_context()
    environ = environment(context, {})
    assert environ["RAY_AUTH_MODE"] == "token"
    assert environ["RAY_AUTH_TOKEN_PATH"] == str(context.rendezvous.token)


def test_scopes_and_values_with_commas_are_kept(make_context):
    context = make_context(
        environment=(
            Variable(name="PYTORCH_CUDA_ALLOC_CONF", value="a:0.8,b:512"),
            Variable(name="ONLY_DRIVER", value="x", scope="driver"),
        )
    )
    ray = environment(context, {})
    driver = driver_environment(context, ray, "10.0.0.1:6379", {})
    assert ray["PYTORCH_CUDA_ALLOC_CONF"] == driver["PYTORCH_CUDA_ALLOC_CONF"] == "a:0.8,b:512"
    assert "ONLY_DRIVER" not in ray
    assert driver["ONLY_DRIVER"] == "x"
    assert driver["RAY_ADDRESS"] == "10.0.0.1:6379"


def test_gloo_gets_one_name_and_nccl_its_pattern(make_context):
    environ = environment(make_context(interface="^lo,docker"), {})
    assert environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert environ["NCCL_SOCKET_IFNAME"] == "^lo,docker"
    assert "NCCL_SOCKET_IFNAME" not in environment(make_context(), {})
    for one_name in ("10.0.0.0/24", "eth7"):
        assert environment(make_context(interface=one_name), {})["NCCL_SOCKET_IFNAME"] == "=eth7"


def test_without_preload_the_library_is_empty(make_context):
    environ = environment(make_context(), {}, nccl=None)
    assert environ["MILES_HPC_NCCL"] == ""
    assert environ["PYTHONPATH"] == f"{PYTHON_START}:/frozen"


def test_nodes_that_share_a_host_have_different_tags(make_context):
    tags = {make_context(index).job_tag for index in range(3)}
    assert len(tags) == 3


def test_placeholders_are_filled_once_and_other_braces_stay():
    values = {"run_dir": "/runs/{num_nodes}", "num_nodes": "2"}
    argv = ("{run_dir}/x", "--n={num_nodes}", '{"json": 1}', "{unknown}")
    assert fill_placeholders(argv, values) == (
        "/runs/{num_nodes}/x", "--n=2", '{"json": 1}', "{unknown}",
    )  # fmt: skip
    assert fill_placeholders(argv, {}) == argv


def test_jobs_of_two_clusters_on_one_host_have_different_tags(make_context, tmp_path):
    context = make_context()
    other = replace(context, run=RunDir(tmp_path / "other"))
    assert context.job_tag != other.job_tag
