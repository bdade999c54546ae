"""Environment variables: read at call time, parsed once in one place, refused with a reason."""

from pathlib import Path

import pytest

from frost import env


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in (*env.VARIABLES, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "frost"
    assert env.kernel_cache_dir() == tmp_path / ".cache" / "frost" / "kernels"
    assert env.gate_dir() == tmp_path / ".cache" / "frost" / "gates"
    assert env.gates() == "require"
    assert env.plan_cache_size() == 256
    assert env.check_values() is False


@pytest.mark.parametrize("name, text, read, want", [
    ("FROST_CACHE_DIR", "/some/where", env.cache_dir, Path("/some/where")),
    ("FROST_CACHE_DIR", "off", env.cache_dir, None),
    ("FROST_CACHE_DIR", "off", env.kernel_cache_dir, None),
    ("FROST_CACHE_DIR", "off", env.gate_dir, None),
    ("FROST_CACHE_DIR", "./off", env.cache_dir, Path("off")),
    ("FROST_GATE_DIR", "/gates", env.gate_dir, Path("/gates")),
    ("FROST_GATES", " Auto ", env.gates, "auto"),
    ("FROST_GATES", "", env.gates, "require"),
    ("FROST_PLAN_CACHE_SIZE", "3", env.plan_cache_size, 3),
    ("FROST_CHECK_VALUES", "on", env.check_values, True),
    ("FROST_CHECK_VALUES", "0", env.check_values, False),
])
def test_a_value_is_read_at_the_call(monkeypatch, name, text, read, want):
    monkeypatch.setenv(name, text)
    assert read() == want


@pytest.mark.parametrize("name, text, read", [
    ("FROST_GATES", "never", env.gates),
    ("FROST_PLAN_CACHE_SIZE", "0", env.plan_cache_size),
    ("FROST_PLAN_CACHE_SIZE", "many", env.plan_cache_size),
    ("FROST_CHECK_VALUES", "perhaps", env.check_values),
])
def test_a_bad_value_names_the_variable_and_what_is_expected(monkeypatch, name, text, read):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}: given '{text}', expected"):
        read()


def test_xdg_cache_home_counts_only_where_it_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "frost"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == Path("/home/x/.cache/frost")


def test_no_home_means_no_cache_folder(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(no_home))
    assert env.cache_dir() is None
    assert env.gate_dir() is None


def test_every_variable_says_what_it_is():
    for name, variable in env.VARIABLES.items():
        assert name.startswith("FROST_") and name == variable.name
        assert variable.default and variable.expects and variable.doc.endswith(".")
