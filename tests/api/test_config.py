"""The environment variables: parsed once, all in one table, unknown names refused."""

from __future__ import annotations

import pytest

from pycoll.bootstrap.discovery.discover import inside_job
from pycoll.bootstrap.discovery.torch_variables import inherited_variables
from pycoll.bootstrap.rendezvous import elastic_worker
from pycoll.config import PREFIX, RENAMED, SETTINGS, Config, _warn_renamed, describe, is_on
from pycoll.errors import InvalidArgumentError

SECRET = "0123456789abcdef"

GOOD = [
    ("PYCOLL_RANK", "0", "rank", 0),
    ("PYCOLL_SIZE", "12", "size", 12),
    ("PYCOLL_LOCAL_RANK", "3", "local_rank", 3),
    ("PYCOLL_LOCAL_SIZE", "4", "local_size", 4),
    ("PYCOLL_ADDRESS", "[::1]:4711", "address", "[::1]:4711"),
    ("PYCOLL_SECRET", SECRET, "secret", SECRET.encode()),
    ("PYCOLL_JOB_ID", "night", "job_id", "night"),
    ("PYCOLL_STORE", "launcher", "store", "launcher"),
    ("PYCOLL_ELASTIC", "night-crew", "elastic", "night-crew"),
    ("PYCOLL_ELASTIC_WORKER", "5", "elastic_worker", 5),
    ("PYCOLL_TICKET", "dGlja2V0", "ticket", "dGlja2V0"),
    ("PYCOLL_HOST_ID", "rack 7", "host_id", "rack 7"),
    ("PYCOLL_TRANSPORTS", "tcp", "transports", ("tcp",)),
    ("PYCOLL_TRANSPORTS", "tcp, shm", "transports", ("shm", "tcp")),
    ("PYCOLL_INTERFACES", "eth0,eth1", "interfaces", ("eth0", "eth1")),
    ("PYCOLL_VERBS_DEVICES", "mlx5_0, mlx5_1:2", "verbs_devices", ("mlx5_0", "mlx5_1:2")),
    ("PYCOLL_VERBS_RAILS", "2", "verbs_rails", 2),
    ("PYCOLL_PORT_RANGE", "4000-4010", "port_range", (4000, 4010)),
    ("PYCOLL_PORT_RANGE", "4000", "port_range", (4000, 4000)),
    ("PYCOLL_TCP_SOCKETS", "4", "tcp_sockets", 4),
    ("PYCOLL_TIMEOUT_S", "0.5", "timeout_s", 0.5),
    ("PYCOLL_INIT_TIMEOUT_S", "10", "init_timeout_s", 10.0),
    ("PYCOLL_ISA", "avx2", "isa", "avx2"),
    ("PYCOLL_DETERMINISTIC", "1", "deterministic", True),
    ("PYCOLL_DETERMINISTIC", "False", "deterministic", False),
    ("PYCOLL_TUNING", "/a/b.json", "tuning", "/a/b.json"),
    ("PYCOLL_DEVICE_MEMORY_MIB", "8", "device_memory_mib", 8),
    ("PYCOLL_DEVICE_PROTOCOL", "pattern", "device_protocol", "pattern"),
    ("PYCOLL_DEVICE_RDMA", "0", "device_rdma", False),
    ("PYCOLL_SHARED_ARRAYS", "1", "shared_arrays", True),
    ("PYCOLL_CPU_BALANCING", "0", "cpu_balancing", False),
    ("PYCOLL_OTHER_BACKENDS", "0", "other_backends", False),
    ("PYCOLL_COMPILER_RULE", "0", "compiler_rule", False),
    ("PYCOLL_JAX_CLUSTER", "0", "jax_cluster", False),
    ("PYCOLL_MPI_WATCH", "0", "mpi_watch", False),
    ("PYCOLL_STORE_CHECKS", "1", "store_checks", True),
]

BAD = [
    ("PYCOLL_RANK", "-1", "whole number of at least 0"),
    ("PYCOLL_RANK", "one", "whole number of at least 0"),
    ("PYCOLL_SIZE", "0", "whole number of at least 1"),
    ("PYCOLL_ADDRESS", "", "not empty"),
    ("PYCOLL_STORE", "rank1", "rank0, launcher"),
    ("PYCOLL_TRANSPORTS", "shm,ib", "'ib' is no transport; there are shm, verbs, tcp"),
    ("PYCOLL_TRANSPORTS", ",", "names separated by commas"),
    ("PYCOLL_PORT_RANGE", "9-8", "first-last"),
    ("PYCOLL_PORT_RANGE", "0-70000", "first-last"),
    ("PYCOLL_TCP_SOCKETS", "9", "from 1 to 8"),
    ("PYCOLL_VERBS_RAILS", "0", "from 1 to 4"),
    ("PYCOLL_VERBS_RAILS", "5", "from 1 to 4"),
    ("PYCOLL_ELASTIC_WORKER", "-1", "whole number of at least 0"),
    ("PYCOLL_TIMEOUT_S", "0", "above 0"),
    ("PYCOLL_TIMEOUT_S", "-3", "above 0"),
    ("PYCOLL_TIMEOUT_S", "nan", "above 0"),
    ("PYCOLL_TIMEOUT_S", "inf", "above 0"),
    ("PYCOLL_INIT_TIMEOUT_S", "soon", "above 0"),
    ("PYCOLL_ISA", "neon", "reference, portable, avx2, avx512, avx512fp16"),
    ("PYCOLL_DETERMINISTIC", "maybe", "1 or 0"),
    ("PYCOLL_TUNING", "", "not empty"),
    ("PYCOLL_DEVICE_MEMORY_MIB", "0", "from 1 to 1048576"),
    ("PYCOLL_DEVICE_PROTOCOL", "LL", "auto, pattern, ll, ll128, simple"),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_a_variable_sets_its_field(name: str, text: str, field: str, value: object) -> None:
    config = Config.read({name: text, "HOME": "/root"})
    assert getattr(config, field) == value
    assert config._replace(**{field: getattr(Config(), field)}) == Config()


@pytest.mark.parametrize(("name", "text", "wanted"), BAD)
def test_a_bad_value_names_variable_value_and_bound(name: str, text: str, wanted: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Config.read({name: text})
    assert f"{name}={text!r}" in str(caught.value)
    assert wanted in str(caught.value)


def test_a_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Config.read({"PYCOLL_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "16" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("PYCOLL_TRANSPORT", "PYCOLL_TRANSPORTS"),
        ("PYCOLL_TIMEOUT", "PYCOLL_TIMEOUT_S"),
        ("PYCOLL_RNAK", "PYCOLL_RANK"),
        ("PYCOLL_PORTS_RANGE", "PYCOLL_PORT_RANGE"),
    ],
)
def test_an_unknown_variable_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} .*did you mean {nearest}\\?"):
        Config.read({name: "1"})


def test_an_unknown_variable_near_nothing_lists_all() -> None:
    with pytest.raises(InvalidArgumentError, match="PYCOLL_XYZZY ") as caught:
        Config.read({"PYCOLL_XYZZY": "1"})
    assert all(setting.variable in str(caught.value) for setting in SETTINGS)


@pytest.mark.parametrize(
    ("old", "new", "text", "field", "value"),
    [
        ("PYCOLL_ROSTER", "PYCOLL_ELASTIC", "night-crew", "elastic", "night-crew"),
        ("PYCOLL_MEMBER", "PYCOLL_ELASTIC_WORKER", "5", "elastic_worker", 5),
    ],
)
def test_an_old_name_works_and_warns_once(
    old: str, new: str, text: str, field: str, value: object
) -> None:
    assert RENAMED[old] == new
    _warn_renamed.cache_clear()
    with pytest.warns(DeprecationWarning, match=f"^{old} is now called {new}$") as caught:
        for _ in range(2):
            assert getattr(Config.read({old: text}), field) == value
    assert len(caught) == 1
    with pytest.raises(InvalidArgumentError, match=f"{old} and {new} are both set.*set {new} only"):
        Config.read({old: text, new: text})


def test_an_error_in_the_value_of_an_old_name_says_the_new_name() -> None:
    with pytest.raises(InvalidArgumentError, match="PYCOLL_ELASTIC_WORKER='x': expected"):
        Config.read({"PYCOLL_MEMBER": "x"})


def test_renamed_variables_are_known_and_their_old_names_are_free() -> None:
    known = {setting.variable for setting in SETTINGS}
    assert set(RENAMED.values()) <= known
    assert not known & RENAMED.keys()


def test_old_names_count_outside_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside_job({"PYCOLL_ROSTER": "night-crew"})
    outer = {"PYCOLL_ROSTER": "night-crew", "PYCOLL_MEMBER": "5", "RANK": "1"}
    assert inherited_variables(outer) == {
        "PYCOLL_ELASTIC": "night-crew",
        "PYCOLL_ELASTIC_WORKER": "5",
    }
    monkeypatch.setenv("PYCOLL_ROSTER", "night-crew")
    assert elastic_worker.inside()


def test_the_table_covers_every_field_once() -> None:
    fields = list(Config._fields)
    assert sorted(setting.field for setting in SETTINGS) == sorted(fields)
    assert len({setting.variable for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.variable.startswith(PREFIX) for setting in SETTINGS)


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.read({}) == Config()
    assert (Config().timeout_s, Config().init_timeout_s) == (300.0, 60.0)
    assert Config().transports == ("shm", "tcp")


def test_the_description_hides_the_secret_and_reads_back() -> None:
    config = Config.read({name: text for name, text, _, _ in GOOD})
    rows = describe(config)
    assert SECRET not in str(rows)
    assert SECRET not in repr(config)
    assert "dGlja2V0" not in str(rows) + repr(config)
    hidden = ("PYCOLL_SECRET", "PYCOLL_TICKET")
    shown = {row.variable: row.value for row in rows if row.variable not in hidden}
    assert config._replace(secret=None, ticket=None) == Config.read(shown)


def test_an_unset_variable_is_described_by_a_dash() -> None:
    rows = {row.variable: row for row in describe()}
    assert rows["PYCOLL_RANK"].value == "-"
    assert rows["PYCOLL_TIMEOUT_S"].value == rows["PYCOLL_TIMEOUT_S"].default == "300"


def test_a_switch_is_read_outside_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_on("mpi_watch") and not is_on("store_checks")
    monkeypatch.setenv("PYCOLL_MPI_WATCH", "0")
    assert not is_on("mpi_watch")
    monkeypatch.setenv("PYCOLL_RNAK", "1")
    assert is_on("mpi_watch"), "init() raises the error"
