"""The command line: ``pycoll run``, ``bench``, ``tune``, ``doctor``, ``info`` and others."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pycoll.errors import PycollError
from pycoll.foreign_words import about_call, about_option
from pycoll.tools.units import Bytes, Seconds, SecondsPerByte

if TYPE_CHECKING:
    from pycoll.launch.elastic_jobs import ElasticOptions
    from pycoll.launch.host_starts import HostsOptions
    from pycoll.launch.node_meeting import NodeOptions

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "gather",
    "scatter",
    "all_to_all",
    "scan",
    "exscan",
)


def _fail(error: PycollError) -> click.ClickException:
    return click.ClickException(str(error))


# Not generic before click 8.2.
class _Collective(click.Choice):  # type: ignore[type-arg]
    """One of COLLECTIVES; the error for another library's word names pycoll's word."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the word, or exit with a usage error."""
        if value not in self.choices and about_call(value):
            self.fail(f"{value!r} is not one of them{about_call(value)}", param, ctx)
        return super().convert(value, param, ctx)


class _Command(click.Command):
    """A command whose error for another library's option names pycoll's option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, or exit with a usage error."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            name = getattr(error, "option_name", None)
            for word in given if name is None else [name]:
                if word.startswith("-"):
                    _refuse_foreign_option(ctx, word)
            raise


def _refuse_foreign_option(context: click.Context, word: str) -> None:
    advice = about_option(context.command.name or "", word)
    known = [one for option in context.command.get_params(context) for one in option.opts]
    if advice and word.partition("=")[0] not in known:
        raise click.UsageError(f"No such option {word.partition('=')[0]!r}: {advice}.", context)


def _check_options(word: str) -> None:
    """Exit with a usage error if ``word``, the command to run, is a misplaced option. No program
    begins with a dash; "-m" runs a Python module."""
    if not word.startswith("-") or word == "-m":
        return
    name = word.partition("=")[0]
    context = click.get_current_context()
    _refuse_foreign_option(context, word)
    known = [one for option in context.command.get_params(context) for one in option.opts]
    raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known, n=1))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pycoll-comm", prog_name="pycoll")
def main() -> None:
    """Collective communication whose algorithms are proved before they run."""


def _options_of_hosts(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of jobs on several machines."""
    options = (
        click.option(
            "-H",
            "--hosts",
            metavar="HOST:SLOTS,...",
            multiple=True,
            callback=lambda _context, _option, words: ",".join(words) or None,
            help="Start ranks on these hosts, over ssh; localhost needs no ssh.",
        ),
        click.option(
            "--hostfile",
            metavar="FILE",
            help='The same, a host a line: "host:slots" or "host slots=N".',
        ),
        click.option(
            "-p",
            "--ssh-port",
            type=click.IntRange(min=1, max=65535),
            metavar="PORT",
            help="The port of sshd.  [default: ssh's]",
        ),
        click.option(
            "-i", "--ssh-identity-file", "identity", metavar="FILE", help="The key file of ssh."
        ),
        click.option(
            "--network-interfaces",
            metavar="NAME,...",
            help="The interfaces that nodes and ranks may use.  [default: all]",
        ),
        click.option(
            "-x",
            "variables",
            metavar="NAME[=VALUE]",
            multiple=True,
            help="A variable for the ranks of all hosts; PYCOLL_*, PYTHON*, PATH and those of "
            "frameworks go there anyway.",
        ),
        click.option("--verbose", is_flag=True, help="Say how each host is reached."),
        click.option("--nnodes", type=click.IntRange(min=1), metavar="N", help="How many nodes."),
        click.option(
            "--node-rank", type=click.IntRange(min=0), metavar="N", help="This node, from 0 on."
        ),
        click.option(
            "--address", metavar="HOST:PORT", help="Where the nodes meet; node 0 listens there."
        ),
        click.option(
            "--secret-file", metavar="FILE", help="The job's secret.  [default: PYCOLL_SECRET]"
        ),
        click.option(
            "--start-timeout",
            type=float,
            metavar="SECONDS",
            help="The longest wait for all hosts or nodes.  [default: 60]",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@main.command(
    cls=_Command,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    *("-n", "-np", "--ranks"),
    type=click.IntRange(min=1),
    help="How many ranks: on this machine, on this node with --nnodes, or on all hosts.",
)
@click.option(
    "--servers",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start N servers too: ranks that combine gradients and do not run COMMAND.",
)
@click.option("--prefix", is_flag=True, help="Put rank and host in front of every line of output.")
@click.option(
    "--output-filename",
    metavar="FOLDER",
    help="Write the output of rank R to FOLDER/rank.R/stdout and stderr, on the rank's host.",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Start up to N ranks that fail again, for programs that use elastic.run.",
)
@click.option(
    "--tolerate",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Go on after up to N ranks of all hosts are lost, for programs that shrink.",
)
@click.option(
    "--min-np",
    type=click.IntRange(min=1),
    metavar="N",
    help="Go on after ranks fail while N are left, for programs that use elastic.run.",
)
@click.option(
    "--max-np",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start up to N ranks if there are so many slots.",
)
@click.option(
    "--host-discovery-script",
    metavar="COMMAND",
    help='Run this every second; it prints "host:slots" lines. Other hosts are reached over ssh.',
)
@click.option(
    "--elastic-timeout",
    type=float,
    envvar="HOROVOD_ELASTIC_TIMEOUT",
    metavar="SECONDS",
    help="The longest wait for --min-np ranks.  [default: 600]",
)
@_options_of_hosts
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    command: tuple[str, ...],
    **words: Any,
) -> None:
    """Start COMMAND on N ranks of this machine, or of several.

    A .py file runs with this Python; any other command runs as it is. When a rank fails and is not
    started again or tolerated, the others are stopped, and its exit status becomes that of this
    command. With --min-np, --max-np or a host discovery script the other ranks go on while --min-np
    of them are left.

    On several machines, type it on each of them with --nnodes, --node-rank and --address, or type
    it once with -H or --hostfile, which starts the others over ssh. A host discovery script names
    the hosts too, and may change them while the job runs.
    """
    from pycoll.launch.launcher import launch, threads_of_ranks
    from pycoll.launch.rank_crew import LaunchOptions

    _check_options(command[0])
    try:
        node, hosts = _node_of(words), _hosts_of(words, ranks)
        if hosts is not None:
            sys.exit(_run_on(hosts, words, ranks, command))
        if ranks is None:
            raise click.UsageError("Missing option '-n': how many ranks.")
        options = LaunchOptions(
            ranks=ranks,
            command=command,
            prefix=words["prefix"],
            output_folder=words["output_filename"],
            node=node,
            environment=threads_of_ranks(ranks + words["servers"], os.environ),
            restarts=words["restarts"],
            tolerate=words["tolerate"],
            elastic=_elastic_of(words),
            servers=words["servers"],
        )
        sys.exit(launch(options))
    except PycollError as error:
        raise _fail(error) from error


def _node_of(words: Mapping[str, Any]) -> NodeOptions | None:
    """Return this launcher's place in a job of several, or None for a job of one."""
    from pycoll.config import Config
    from pycoll.launch.node_meeting import START_S, NodeOptions, read_secret

    own = {"--node-rank": "node_rank", "--address": "address", "--secret-file": "secret_file"}
    if words["nnodes"] is None:
        for option, name in own.items():
            if words[name] is not None:
                raise click.UsageError(f"{option} is for a job of several nodes: give --nnodes too")
        return None
    for option, name in list(own.items())[:2]:
        if words[name] is None:
            raise click.UsageError(f"--nnodes needs {option} too")
    if words["hosts"] is not None or words["hostfile"] is not None:
        raise click.UsageError("--nnodes and hosts (-H, --hostfile) are two ways: give one")
    limit = words["start_timeout"]
    return NodeOptions(
        nodes=words["nnodes"],
        node=words["node_rank"],
        secret=read_secret(words["secret_file"], Config.read().secret),
        address=words["address"],
        start_timeout_s=START_S if limit is None else limit,
    )


def _elastic_of(words: Mapping[str, Any]) -> ElasticOptions | None:
    """Return the limits of an elastic job, or None for a job with a fixed number of ranks."""
    from pycoll.launch.elastic_jobs import PATIENCE_S, ElasticOptions

    script = words["host_discovery_script"]
    if not words["min_np"] and not words["max_np"] and script is None:
        return None
    limit = words["elastic_timeout"]
    return ElasticOptions(
        ranks_min=words["min_np"],
        ranks_max=words["max_np"],
        grows=script is not None,
        patience_s=PATIENCE_S if limit is None else limit,
    )


def _hosts_of(words: Mapping[str, Any], ranks: int | None) -> HostsOptions | None:
    """Return the hosts of ``-H``, ``--hostfile`` or the host discovery script, or None without
    them."""
    from pycoll.launch.host_list import parse_hosts, place_ranks, read_hostfile
    from pycoll.launch.host_starts import HostsOptions
    from pycoll.launch.node_meeting import START_S

    # The command doctor has no script.
    text, path, script = words["hosts"], words["hostfile"], words.get("host_discovery_script")
    if script is not None and (text is not None or path is not None or words["nnodes"]):
        raise click.UsageError(
            "--host-discovery-script names the hosts: leave out -H, --hostfile and --nnodes"
        )
    if text is None and path is None and script is None:
        for option, name in (("-p", "ssh_port"), ("-i", "identity"), ("--verbose", "verbose")):
            if words[name]:
                raise click.UsageError(f"{option} is for hosts: give -H or --hostfile too")
        return None
    if text is not None and path is not None:
        raise click.UsageError("-H and --hostfile both name the hosts: give one")
    hosts = []
    if script is None:
        hosts = parse_hosts(text) if text is not None else read_hostfile(path)
        placed = place_ranks(hosts, ranks, words.get("servers") or 0)
        # The other slots of an elastic job replace those that are lost.
        is_elastic = bool(words.get("min_np") or words.get("max_np"))
        hosts = hosts if is_elastic else placed
    limit, interfaces = words["start_timeout"], words["network_interfaces"]
    return HostsOptions(
        hosts=hosts,
        ssh_port=words["ssh_port"],
        identity=words["identity"],
        start_timeout_s=START_S if limit is None else limit,
        interfaces=interfaces.split(",") if interfaces else (),
        variables=words["variables"],
        verbose=words["verbose"],
        discovery=script,
    )


def _run_on(
    hosts: HostsOptions, words: Mapping[str, Any], ranks: int | None, command: tuple[str, ...]
) -> int:
    """Run the command on hosts, report a failure, and return the exit status."""
    from pycoll.launch.elastic_hosts import launch_elastic
    from pycoll.launch.host_starts import Work, launch_on_hosts
    from pycoll.launch.launcher import check_combination

    if ranks is None and hosts.discovery is not None:
        raise click.UsageError("Missing option '-n': how many ranks at the start.")
    # Python buffers its output until the end where that is a pipe.
    at_once = words["prefix"] or os.isatty(1)
    work = Work(
        command,
        prefix=words["prefix"],
        restarts=words["restarts"],
        tolerate=words["tolerate"],
        output_folder=words["output_filename"],
        environment={"PYTHONUNBUFFERED": "1"} if at_once else {},
        elastic=_elastic_of(words),
    )
    check_combination(work.restarts, work.tolerate, words["servers"], work.elastic)
    if work.elastic is None:
        verdict = launch_on_hosts(hosts, work)
    else:
        verdict = launch_elastic(hosts, work, ranks or sum(host.slots for host in hosts.hosts))
    if verdict is None:
        return 0
    for line in verdict.text.splitlines():
        click.echo(f"pycoll run: {line}", err=True)
    return verdict.status


@main.command(cls=_Command)
@click.argument("collective", type=_Collective(COLLECTIVES), metavar="COLLECTIVE")
@click.option("-n", "--ranks", type=click.IntRange(min=1), help="Ranks to start.  [default: 2]")
@click.option("-b", "--begin", type=Bytes(), default="8", show_default=True, help="First size.")
@click.option("-e", "--end", type=Bytes(), default="64M", show_default=True, help="Last size.")
@click.option(
    "-f",
    "--factor",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="Ratio of one size to the one before.",
)
@click.option("--dtype", default="float32", show_default=True, help="Element type.")
@click.option("--op", default="sum", show_default=True, help="Reduction.")
@click.option("--root", type=click.IntRange(min=0), default=0, show_default=True, help="Root rank.")
@click.option(
    "--algorithm",
    "algorithms",
    metavar="NAME",
    multiple=True,
    help="An algorithm, several by repetition, or all.  [default: the selector's choice]",
)
@click.option(
    "--transport", "transports", metavar="LIST", help="Of shm, verbs, tcp.  [default: shm,tcp]"
)
@click.option(
    "--samples", type=click.IntRange(min=5), default=30, show_default=True, help="Per size."
)
@click.option(
    "--check/--no-check", default=True, show_default=True, help="Compare results bit by bit."
)
@click.option(
    "--in-place/--out-of-place", default=True, show_default=True, help="If both are possible."
)
@click.option(
    "--device",
    type=click.Choice(("cpu", "cuda")),
    default="cpu",
    show_default=True,
    help="Device of the arrays.",
)
@click.option("--graph", is_flag=True, help="On devices, replay operations from a captured graph.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write all figures to this file."
)
@click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path), help="Draw a .png, .pdf or .svg."
)
def bench(
    collective: str,
    ranks: int | None,
    begin: int,
    end: int,
    algorithms: tuple[str, ...],
    transports: str | None,
    json_path: Path | None,
    plot_path: Path | None,
    **words: Any,
) -> None:
    """Measure COLLECTIVE over message sizes, as nccl-tests does.

    Columns and bandwidths are those of nccl-tests. COLLECTIVE is all_reduce, reduce, broadcast,
    reduce_scatter, all_gather, gather, scatter, all_to_all, scan or exscan. Every result is
    compared with the exact one; the exit status is 1 if one was wrong. Inside a running job (pycoll
    run, mpirun, torchrun) and without -n, it measures that job's ranks.
    """
    from pycoll.tools.bench.command import Wishes, run_bench
    from pycoll.tools.bench.measuring import BenchOptions

    try:
        options = BenchOptions(
            collective=collective,
            begin_bytes=begin,
            end_bytes=end,
            algorithms=list(algorithms),
            **words,
        )
        sys.exit(run_bench(options, Wishes(ranks, transports, json_path, plot_path)))
    except PycollError as error:
        raise _fail(error) from error


@main.command()
@click.option(
    "--transport",
    "transports",
    type=click.Choice(("shm", "tcp")),
    multiple=True,
    help="Only this one; the other keeps its values.  [default: both]",
)
@click.option(
    "-n", "--ranks", type=click.IntRange(min=2), help="Largest job.  [default: a rank per core]"
)
@click.option("--quick", is_flag=True, help="Measure roughly, in a few seconds.")
@click.option(
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help="File for the result; missing folders are made.  [default: the cache]",
)
def tune(transports: tuple[str, ...], ranks: int | None, quick: bool, path: Path | None) -> None:
    """Measure this machine, so that algorithms are chosen by its own figures.

    It measures latency, bandwidth, the cost of combining and of segments, and the best segment
    length, for shared memory and for tcp on this machine. It takes three to four minutes; no other
    program should run. Later jobs whose rank 0 is on this machine use the result. PYCOLL_TUNING=off
    makes them use the built-in values, and PYCOLL_TUNING=FILE another file.

    As the program of a job on several hosts (mpirun, srun, torchrun), without --ranks, it uses all
    ranks of the job and measures the network between the hosts: the bandwidth of one rank and of
    all ranks of a host together, and shared memory on the slowest host. Every host stores the same
    table; later jobs on these hosts, or on some of them, use it.
    """
    from pycoll.bootstrap.discovery import discover
    from pycoll.config import DEFAULT_TRANSPORTS
    from pycoll.errors import InvalidArgumentError
    from pycoll.tools.tune.host_links import HostsOptions, run_tune_hosts
    from pycoll.tools.tune.machine_links import TuneOptions, run_tune

    try:
        if ranks is not None or not discover.inside_job():
            run_tune(TuneOptions(transports or DEFAULT_TRANSPORTS, ranks, quick, path), click.echo)
        elif transports:
            raise InvalidArgumentError(
                "--transport is for one machine; between hosts the job's own transports are "
                "measured (PYCOLL_TRANSPORTS sets them)"
            )
        else:
            run_tune_hosts(HostsOptions(quick, path), click.echo)
    except PycollError as error:
        raise _fail(error) from error


@main.command()
def info() -> None:
    """Print what is built, what was found on this machine, and every setting."""
    from pycoll.tools.info import print_information

    print_information()


@main.group(invoke_without_command=True)
@click.pass_context
@click.option(
    "--over",
    type=click.FloatRange(min=0.01, max=60),
    default=0.5,
    show_default=True,
    help="Seconds over which rates are measured.",
)
def ps(context: click.Context, over: float) -> None:
    """Print the stores whose servers run on this host: shards, chains, clocks, rates, busy parts.

    Pulls are counted by the last server of a chain, which answers them. Requests that wait are
    shown by how many clocks they lack.

    It shows the servers of this user only; on other hosts it is run there. Commands drain and add
    servers of a store that runs.
    """
    from pycoll.tools.store_status import status_text

    if context.invoked_subcommand is None:
        click.echo(status_text(over))


#: Seconds that ``pycoll ps ticket`` waits for a server.
_TICKET_S = 10.0


def _ps_command(word: str, text: str) -> None:
    @ps.command(name=word, help=text)
    @click.argument("store")
    @click.argument("rank", type=click.IntRange(min=0))
    @click.option(
        "--timeout",
        type=click.FloatRange(min=0.1, max=86400),
        default=600,
        show_default=True,
        help="The longest wait, in seconds.",
    )
    def run(store: str, rank: int, timeout: float) -> None:
        from pycoll.ps.status import command

        try:
            command(store, word, rank, timeout)
        except PycollError as error:
            raise _fail(error) from error


@ps.command()
@click.argument("store")
def ticket(store: str) -> None:
    """Print a ticket, by which new servers and workers join STORE while it runs.

    It is secret: pass it on by the environment, a pipe or a private file. Run it on the host of one
    of the store's servers; newcomers then meet this server.
    """
    from pycoll.ps.status import command

    try:
        click.echo(command(store, "ticket", 0, _TICKET_S))
    except PycollError as error:
        raise _fail(error) from error


_ps_command(
    "drain",
    "Move the shards of server RANK of STORE to the other servers, so that its process may be "
    "ended. Run it on the host of one of the store's servers.",
)
_ps_command(
    "add",
    "Let the drained server RANK of STORE hold shards again. Run it on the host of one of the "
    "store's servers.",
)


@main.command(cls=_Command)
@click.option(
    *("-n", "-np", "--ranks"),
    type=click.IntRange(min=1),
    help="Ranks that shall run: on this machine, on this node with --nnodes, or on all hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_options_of_hosts
def doctor(ranks: int | None, as_json: bool, **words: Any) -> None:
    """Examine this host, or all hosts of a job, and say what to do.

    Without options it examines this host. With -H or --hostfile it examines these hosts over ssh,
    from one of them or from elsewhere; with --nnodes, --node-rank and --address it is started on
    each node. These are the options of pycoll run. Started by mpirun, srun, torchrun or pycoll run,
    it examines the hosts of that job, and rank 0 prints.

    It prints each host's versions, limits and names, who reaches whom by which interface at what
    latency and rate, how far clocks differ, and findings with what to do. The exit status is 1 if
    there is an error or a warning. --start-timeout is 15 seconds for hosts, if it is not given.
    """
    from pycoll.tools.doctor.doctor_command import Wishes, run_doctor

    try:
        node = _node_of(words)
        if words["start_timeout"] is None:
            words["start_timeout"] = 15.0
        hosts = _hosts_of(words, ranks)
        sys.exit(run_doctor(Wishes(ranks or 0, as_json, hosts, node)))
    except PycollError as error:
        raise _fail(error) from error


@main.command()
@click.argument(
    "collective",
    type=_Collective((*COLLECTIVES, "barrier")),
    metavar="[COLLECTIVE]",
    default="all_reduce",
)
@click.option("--size", type=click.IntRange(min=1), help="Ranks.  [default: 8]")
@click.option("--bytes", "nbytes", type=Bytes(), default="1M", show_default=True, help="Message.")
@click.option(
    "--hosts", type=click.IntRange(min=1), default=1, show_default=True, help="Hosts they are on."
)
@click.option(
    "--servers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Servers next to the ranks, each on a host of its own.",
)
@click.option(
    "--local-size", type=click.IntRange(min=1), help="Ranks per host; forecasts all algorithms."
)
@click.option(
    "--domains",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Caches or memory domains of a host, over which its ranks are spread.",
)
@click.option(
    "--memory",
    type=click.Choice(["ordinary", "shared"]),
    default="shared",
    show_default=True,
    help="Memory of the arrays, for the choice's prediction and for --measured.",
)
@click.option("--alpha", type=Seconds(), help="Latency between hosts: 2us.")
@click.option(
    "--beta", type=SecondsPerByte(), help="Rate of a host's link, each way: 25GB/s, 200Gb/s."
)
@click.option("--rails", type=click.IntRange(min=1), help="Number of such links of a host.")
@click.option("--flow", type=SecondsPerByte(), help="Most rate of one rank between hosts: 5GB/s.")
@click.option("--local-alpha", type=Seconds(), help="Latency inside a host: 300ns.")
@click.option("--local-beta", type=SecondsPerByte(), help="Rate of a rank inside a host: 15GB/s.")
@click.option(
    "--algorithm", metavar="NAME", help="Explain this one instead of the selector's choice."
)
@click.option("--rank", type=click.IntRange(min=0), help="Also list the plan of this rank.")
@click.option(
    "--compress",
    metavar="CODEC",
    multiple=True,
    help="Say whether bf16, fp8, int8, int4, sign, topk:0.01 or randomk:0.01 pays; repeatable.",
)
@click.option("--measured", is_flag=True, help="Also run it here, on sizes up to --bytes.")
@click.option(
    "--gradients",
    type=click.Path(path_type=Path),
    help="Compare all methods for the gradients of this CSV file, on --hosts of --local-size.",
)
@click.option(
    "--plot",
    "picture",
    type=click.Path(path_type=Path),
    help="Draw the forecast: .png, .pdf or .svg.",
)
def explain(
    measured: bool,
    alpha: float | None,
    beta: float | None,
    local_alpha: float | None,
    local_beta: float | None,
    rails: int | None,
    flow: float | None,
    gradients: Path | None,
    **words: Any,
) -> None:
    """Print which algorithm runs, why, and its expected cost.

    COLLECTIVE is all_reduce (if none is named), reduce, broadcast, reduce_scatter, all_gather,
    gather, scatter, all_to_all, scan, exscan or barrier.

    With --local-size or --plot it also forecasts the time of every algorithm: by message size, and
    of one message in worlds of up to 16384 ranks. The machines need not exist: alpha is a link's
    latency, in ns, us or ms; beta is a link's rate, in bytes (25GB/s) or bits (200Gb/s) per second,
    with powers of ten. A value that is not given is that of pycoll tune on this machine, or a
    built-in one. With --measured it predicts for this machine and measures there; where ranks share
    its cores, "ranks per core" is printed.

    With --compress it also predicts the collective with a codec: the bytes on the wire, the time of
    the links, that of the codec on a core, and whether it pays. With --gradients the codecs are
    further methods.

    With --gradients it predicts a training step by every method instead, without servers and with
    --servers of them (by default as many as --hosts), and names the best. Each line of the file is
    a gradient, in the order of the backward pass: tensor,elements,microseconds_after_previous.
    """
    from pycoll.tools.explain import Question, comparison, explanation
    from pycoll.tools.explain_methods import methods_text

    links = {"alpha": alpha, "beta": beta, "local_alpha": local_alpha, "local_beta": local_beta}
    links |= {"rails": rails, "flow": flow}
    try:
        question = Question(links=links, measured=measured, **words)
        if gradients is not None:
            click.echo(methods_text(question, gradients))
            return
        click.echo(explanation(question))
        if measured:
            for line in comparison(question):
                click.echo(line)
    except PycollError as error:
        raise _fail(error) from error


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path),
    help="File for the trace.  [default: FILE.merged.json]",
)
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), help="Draw a step: .png, .pdf or .svg."
)
@click.option("--step", type=click.IntRange(min=0), help="Step to draw.  [default: a typical one]")
def timeline(
    files: tuple[Path, ...], path: Path | None, picture: Path | None, step: int | None
) -> None:
    """Merge ranks' timelines into one trace for chrome://tracing or Perfetto.

    FILES were written by hvd.start_timeline or HOROVOD_TIMELINE, one for each rank. With a single
    FILE, those of ranks 1, 2, ... in the same folder (FILE.1.json) are found. A file that a rank
    could not complete is read up to its last complete event.

    For steps with a policy it prints the share of the communication time that was hidden: the share
    in which the program did not wait for communication. --plot draws one such step, the backward
    pass above and communication below.
    """
    from pycoll.tools import overlaps, timelines
    from pycoll.tools.outputs import check_output
    from pycoll.tools.pictures import check_picture

    target = path or files[0].with_name(f"{files[0].stem}.merged.json")
    try:
        check_output(target, "--output")
        if picture is not None:
            check_picture(picture)
        paths = timelines.siblings(files[0]) if len(files) == 1 else list(files)
        events = timelines.merge(paths)
        timelines.write(target, events)
        ranks = len(paths)
        last_s = max(float(event["ts"]) for event in events) / 1e6
        click.echo(f"{target}: {len(events)} events of {ranks} rank(s), {last_s:.3f} s")
        steps = overlaps.steps_of(events)
        for line in overlaps.lines_of(steps):
            click.echo(line)
        if picture is not None:
            overlaps.plot(picture, overlaps.choose_step(steps, step))
            click.echo(f"picture: {picture}")
    except PycollError as error:
        raise _fail(error) from error
