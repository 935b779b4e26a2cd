import dataclasses
import json
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rsi.config import (
    ROOT,
    Config,
    changed_keys,
    dump,
    find_preset,
    flat,
    load,
    parse_override,
    save_provenance,
    write_atomic,
)


def write(folder: Path, text: str) -> Path:
    path = folder / "preset.toml"
    path.write_text(text)
    return path


def test_overrides_beat_the_preset_and_the_preset_beats_the_defaults(tmp_path: Path) -> None:
    preset = write(tmp_path, 'name = "mine"\n[rpr]\nupdates = 3\nlr = 1e-4\n')
    config = load(preset, ["rpr.updates=5", "rpr.updates=6", "sandbox.kind=docker", "tasks.ladder_rungs=[4, 7]"])
    assert (config.name, config.rpr.updates, config.rpr.lr, config.rpr.epochs) == ("mine", 6, 1e-4, 2)
    assert (config.sandbox.kind, config.tasks.ladder_rungs) == ("docker", (4, 7))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rpr.lr=3e-4", 3e-4),
        ("rpr.lr=.5", 0.5),
        ("rpr.whiten=false", False),
        ("seed=7", 7),
        ("name=7", "7"),
        ('name="a b"', "a b"),
        ("base=/some/folder", "/some/folder"),
        ("base=a=b", "a=b"),
    ],
)
def test_override_values_are_read_by_the_type_of_their_key(text: str, expected: object) -> None:
    key, value = parse_override(text)
    assert value == expected and type(value) is type(expected)
    assert flat(load(None, [text]))[key] == expected


def test_none_can_be_set_over_a_preset(tmp_path: Path) -> None:
    preset = write(tmp_path, 'base = "x"\n[rpr]\ndual_clip = 3.0\n')
    assert load(preset).rpr.dual_clip == 3.0
    config = load(preset, ["base=none", "rpr.dual_clip=none"])
    assert config.base is None and config.rpr.dual_clip is None
    assert load(write(tmp_path, dump(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rpr.updats=4", "unknown configuration key 'rpr.updats': did you mean 'rpr.updates'"),
        ("updates=4", "did you mean 'rpr.updates'"),
        ("rsr.critic_lr=1", "did you mean 'rpr.critic_lr'"),
        ("zzz.qqq=1", "sections are base_training, calibration"),
        ("rpr=1", "'rpr' is a section"),
        ("seed.x=1", "did you mean 'seed'"),
        ("rpr.updates", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("rpr.updates=many", "rpr.updates must be a whole number, got 'many'"),
        ("rpr.updates=1.5", "rpr.updates must be a whole number, got 1.5"),
        ("rpr.updates=true", "rpr.updates must be a whole number, got True"),
        ("rpr.lr=nan", "rpr.lr must be finite"),
        ("rpr.dual_clip=x", "rpr.dual_clip must be a number or none, got 'x'"),
        ("tasks.ladder_rungs=4", "tasks.ladder_rungs must be a list, each element a whole number, got 4"),
        ("tasks.ladder_rungs=[4,4]", r"\[tasks\] ladder_rungs must be different"),
        ("rpr.updates=0", r"\[rpr\] updates must be above 0, got 0"),
        ("rpr.dual_clip=0.9", "dual_clip must be above 1, got 0.9"),
        ("rpr.gamma_u=1.01", r"gamma_u must lie in \[0, 1\], got 1.01"),
        ("sandbox.kind=dokcer", "kind is 'dokcer', expected one of bubblewrap, docker"),
        ("reward.alpha=0.8", "a failure could come too close to a success"),
        ("model.num_kv_heads=3", r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"),
        ("engine.context=4096", r"engine.context \(4096\) exceeds model.context \(1024\)"),
        ("engine.max_new_tokens=2000", r"max_new_tokens \(2000\) must be below engine.context"),
        ("tasks.num_validation=10", "every stage would be rolled back"),
        ("sandbox.image=debian", "images need sandbox.kind=docker"),
    ],
)
def test_mistakes_are_named(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(None, [override])


def test_mistakes_in_the_preset_are_named_like_those_in_overrides(tmp_path: Path) -> None:
    for text, message in [
        ("[rpr]\nupdats = 4\n", "did you mean 'rpr.updates'"),
        ("[rprr]\nupdates = 4\n", "rprr"),
        ("rpr = 4\n", "is a section"),
        ("[seed]\nx = 1\n", "seed is a single value"),
        ("[rpr\n", "not valid TOML"),
    ]:
        with pytest.raises(ValueError, match=message):
            load(write(tmp_path, text))
    with pytest.raises(ValueError, match="no preset 'nowhere'.*tiny"):
        load("nowhere")


def test_pass_through_tables_keep_what_is_in_them(tmp_path: Path) -> None:
    preset = write(tmp_path, '[sglang]\nmem_fraction_static = 0.5\nx = ["a"]\n[sglang.deep]\nb = true\n')
    config = load(preset, ["megatron.recompute_granularity=full", "sglang.tp=2"])
    assert config.sglang == {"mem_fraction_static": 0.5, "x": ["a"], "deep": {"b": True}, "tp": 2}
    assert config.megatron == {"recompute_granularity": "full"}
    assert load(write(tmp_path, dump(config))) == config


@given(name=st.text(st.characters(exclude_categories=("Cs",))), lr=st.floats(1e-300, 1e300), seed=st.integers(0, 2**60))
def test_dump_and_load_are_inverse(tmp_path_factory: pytest.TempPathFactory, name: str, lr: float, seed: int) -> None:
    config = dataclasses.replace(Config(), name=name, seed=seed)
    config = dataclasses.replace(config, rpr=dataclasses.replace(config.rpr, lr=lr))
    path = tmp_path_factory.mktemp("dump") / "c.toml"
    path.write_bytes(dump(config).encode())
    again = load(path)
    assert dataclasses.replace(again, name="") == dataclasses.replace(config, name="")
    assert again.name == name


def test_every_preset_loads_and_survives_a_round_trip(tmp_path: Path) -> None:
    presets = sorted((ROOT / "scripts" / "presets").glob("*.toml"))
    assert find_preset("tiny") in presets
    for preset in presets:
        assert load(write(tmp_path, dump(load(preset)))) == load(preset)


def test_every_field_has_a_plain_type() -> None:
    for cls in [Config, *(t for t in typing.get_type_hints(Config).values() if dataclasses.is_dataclass(t))]:
        assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined,union-attr]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]


def test_provenance_is_saved_and_each_launch_noted(tmp_path: Path) -> None:
    config = load("tiny")
    assert save_provenance(tmp_path / "run", config, ["train", "--seed", "0"]) is False
    assert save_provenance(tmp_path / "run", config, ["train", "again"]) is True
    run = tmp_path / "run"
    assert load(run / "config.toml") == config
    assert [line.split("  ", 1)[1] for line in (run / "command.txt").read_text().splitlines()] == [
        "train --seed 0",
        "train again",
    ]
    launches = json.loads((run / "env.json").read_text())["launches"]
    assert len(launches) == 2 and launches[0]["versions"]["msgspec"] and launches[0]["argv"] == ["train", "--seed", "0"]
    assert (run / "source.diff").is_file()
    assert not list(run.glob(".*tmp"))


def test_resuming_with_another_configuration_lists_the_keys(tmp_path: Path) -> None:
    save_provenance(tmp_path, load("tiny"), [])
    expected = r"(?s)another configuration.*rpr\.lr: \S+ -> 0\.1\n  seed: 0 -> 1"
    with pytest.raises(ValueError, match=expected) as error:
        save_provenance(tmp_path, load("tiny", ["rpr.lr=0.1", "seed=1", "world.threads=2"]), [])
    assert "threads" not in str(error.value)
    assert load(tmp_path / "config.toml") == load("tiny")
    moved = load("tiny", ["world.threads=2", "run_dir=elsewhere"])
    assert changed_keys(load("tiny"), moved) == {}
    assert save_provenance(tmp_path, moved, []) is True


def test_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        save_provenance(tmp_path / "file", load("tiny"), [])


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "results.json"
    write_atomic(target, "old")
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from megatron_rsi.config import write_atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_atomic(Path(sys.argv[1]), 'x' * 5000)\n"
        "except OSError as error: print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(target)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "refused"
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
