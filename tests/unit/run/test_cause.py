"""Which cause a log tells of, on lines as PyTorch, NCCL, Ray and the kernel's tools print them."""

import pytest

from miles_hpc.run.cause import (
    Cause,
    LogEnd,
    cause_of_driver_end,
    cause_of_slurm_word,
    find_in_logs,
    last_exception,
    one_line,
)

TRACEBACK = "Traceback (most recent call last):"
FRAME = '  File "loop.py", line 7, in step'
GPU = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of "
    "139.72 GiB of which 11.19 MiB is free."
)
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2027, "
    "remote process exited or there was a network error, NCCL version 2.30.7"
)
ACTOR = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."


def driver(*lines):
    return LogEnd("driver.log", lines)


def raised(line):
    return driver("loading", TRACEBACK, FRAME, line)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (GPU, Cause.GPU_OOM),
        ("RuntimeError: CUDA error: out of memory", Cause.GPU_OOM),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling it", Cause.GPU_OOM),
        ("MemoryError", Cause.HOST_OOM),
        ("OSError: [Errno 12] Cannot allocate memory", Cause.HOST_OOM),
        (
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes",
            Cause.HOST_OOM,
        ),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            Cause.HOST_OOM,
        ),
        ("OSError: [Errno 28] No space left on device: 'x'", Cause.DISK_FULL),
        ("OSError: [Errno 122] Disk quota exceeded", Cause.DISK_FULL),
        (NCCL, Cause.NCCL),
        ("torch.distributed.DistBackendError: ncclSystemError: x", Cause.NCCL),
        ("ray.exceptions.NodeDiedError: the node died", Cause.NODE_FAILURE),
        ("ValueError: tp must divide heads", Cause.USER_CODE),
        ("my.package.Odd: what", Cause.USER_CODE),
        ("KeyError: 'reward'", Cause.USER_CODE),
    ],
)
def test_the_drivers_own_exception_names_its_cause(line, cause):
    found = cause_of_driver_end(raised(line), (), 1)
    assert found.cause is cause
    assert found.evidence == one_line(f"driver.log: {line}")


def test_an_actors_exception_is_read_through_rays_prefix_and_wrapping():
    log = driver(
        "\x1b[36m(TrainActor pid=4711, ip=10.0.0.2)\x1b[0m step 3",
        f"(TrainActor pid=4711) {TRACEBACK}",
        f"(TrainActor pid=4711) {FRAME}",
        "(TrainActor pid=4711) ZeroDivisionError: division by zero",
        TRACEBACK,
        '  File "driver.py", line 9, in <module>',
        "ray.exceptions.RayTaskError(ZeroDivisionError): ray::TrainActor.step() (pid=4711)",
        '  File "actor.py", line 5, in step',
        "ZeroDivisionError: division by zero",
        "bye: the end",
    )
    found = cause_of_driver_end(log, (), 1)
    assert (found.cause, found.evidence) == (
        Cause.USER_CODE,
        "driver.log: ZeroDivisionError: division by zero",
    )


def test_memory_of_one_rank_is_the_cause_of_its_peers_nccl_error():
    worker = LogEnd("ray-n2/worker-1.err", ("step 2", GPU))
    found = cause_of_driver_end(raised(NCCL), (worker,), 1)
    assert found.cause is Cause.GPU_OOM
    assert found.evidence.startswith("ray-n2/worker-1.err: torch.OutOfMemoryError")


def test_an_error_that_was_survived_does_not_replace_the_one_that_ended_the_driver():
    log = driver(GPU, "retry with a smaller batch", TRACEBACK, FRAME, "ValueError: empty batch")
    assert cause_of_driver_end(log, (), 1).cause is Cause.USER_CODE


def test_a_dead_actor_sends_us_to_the_other_logs_and_is_no_fault_of_user_code():
    full = LogEnd("ray-n1/worker-9.err", ("OSError: [Errno 28] No space left on device",))
    assert cause_of_driver_end(raised(ACTOR), (full,), 1).cause is Cause.DISK_FULL
    alone = cause_of_driver_end(raised(ACTOR), (), 1)
    assert (alone.cause, alone.evidence) == (Cause.UNKNOWN, one_line(f"driver.log: {ACTOR}"))


@pytest.mark.parametrize(
    ("code", "cause", "words"),
    [
        (3, Cause.USER_CODE, "ended with 3; its last line: no such recipe"),
        (-11, Cause.UNKNOWN, "ended by signal 11"),
        (None, Cause.UNKNOWN, "an unknown code"),
    ],
)
def test_without_an_exception_the_last_line_is_shown(code, cause, words):
    found = cause_of_driver_end(driver("no such recipe", ""), (), code)
    assert found.cause is cause
    assert words in found.evidence


def test_a_silent_driver_is_said_to_be_silent():
    assert "(no output)" in cause_of_driver_end(driver(), (), -9).evidence


def test_no_line_no_cause():
    assert find_in_logs((driver("epoch 1", "loss 0.3"),)) is None
    assert last_exception(("fine", "Error: this is no traceback")) is None


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("OUT_OF_MEMORY", Cause.HOST_OOM),
        ("NODE_FAIL", Cause.NODE_FAILURE),
        ("TIMEOUT", Cause.TIME_LIMIT),
        ("PREEMPTED", Cause.PREEMPTION),
        ("CANCELLED by 1000", Cause.CANCELLED),
        ("CANCELLED+", Cause.CANCELLED),
        ("FAILED", None),
        ("", None),
    ],
)
def test_slurms_word_is_evidence_where_it_names_a_cause(word, cause):
    found = cause_of_slurm_word(word, "NodeDown")
    assert (None if found is None else found.cause) is cause
    if found is not None:
        assert found.evidence == f"Slurm: JobState={word} Reason=NodeDown"


def test_evidence_is_one_line_of_bounded_length():
    text = one_line("a\n  b\t" + "c" * 999)
    assert text.startswith("a b ccc")
    assert (len(text), text[-3:]) == (300, "...")
