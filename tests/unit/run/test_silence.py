"""How long a driver may be silent: what its phases have taken, and the floor."""

from miles_hpc.run.events import EventLog, Kind
from miles_hpc.run.silence import Silence


def tell(silence, *events):
    for time_s, kind, fields in events:
        silence.note({"time_s": time_s, "kind": kind, "node": "n1", **fields})


def phase(time_s, name, step=1):
    return time_s, Kind.PHASE, {"phase": name, "step": step}


def step(time_s, number=1):
    return time_s, Kind.STEP, {"step": number}


def test_three_times_the_longest_of_the_same_phase_counts_above_the_floor():
    silence = Silence()
    tell(silence, phase(0, "rollout"), phase(100, "train"), step(110), phase(110, "rollout", 2))
    assert silence.limit_s(60) == 300
    assert silence.where() == "phase rollout of step 2"
    tell(silence, phase(120, "train", 2))
    assert silence.limit_s(60) == 60
    assert silence.limit_s(5) == 30


def test_time_between_steps_belongs_to_no_phase():
    silence = Silence()
    tell(silence, phase(0, "train"), step(10), phase(500, "train", 2))
    assert silence.limit_s(1) == 30


def test_only_the_drivers_own_events_are_signs_of_life():
    silence = Silence()
    tell(silence, (1, Kind.MEMORY_ALARM, {}), (2, Kind.WARNING, {}), (3, Kind.NODE_JOINED, {}))
    assert (silence.num_events, silence.phase) == (0, "")
    tell(silence, (4, Kind.ONLOAD, {}))
    assert silence.num_events == 1
    silence.note({"kind": "phase", "phase": "train"})
    assert silence.phase == ""


def test_earlier_attempts_are_learned_from_but_not_what_they_hung_in(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", "n1")
    told = (
        (0.0, "attempt_started", {}),
        phase(1.0, "train"),
        step(21.0),
        phase(22.0, "rollout", 2),
        (9000.0, "attempt_started", {}),
        phase(9001.0, "load", 0),
    )
    with log.path.open("w") as file:
        for time_s, kind, fields in told:
            text = ", ".join(f'"{k}": {v!r}'.replace("'", '"') for k, v in fields.items())
            file.write(f'{{"time_s": {time_s}, "kind": "{kind!s}"{", " if text else ""}{text}}}\n')
    silence = Silence()
    silence.learn(log.path)
    assert (silence.phase, silence.num_events) == ("", 0)
    tell(silence, phase(9100, "train", 2))
    assert silence.limit_s(1) == 60
    tell(silence, phase(9101, "rollout", 2))
    assert silence.limit_s(1) == 1
