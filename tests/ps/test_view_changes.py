"""What servers do while their views change, message by message."""

from __future__ import annotations

from simulated_servers import World

from pycoll.ps.consistency import ASP
from pycoll.ps.messages import EXCLUDED, Kind, Message
from pycoll.ps.replica import Replica
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.views import View, Voter, first_view


def proposed(view: View, kind: Kind = Kind.PROPOSE) -> Message:
    return Message(kind, view=view.number, payload=view.to_bytes())


def test_a_shard_rests_until_a_view_holds_though_its_servers_are_the_same_again() -> None:
    world = World(1, ASP, workers=3, servers=3)
    first = world.view
    server = world.servers[4]
    filled = first._replace(number=2, filling=(-1, 5, -1))
    again = first._replace(number=3, servers=(3, 4))

    def push(view: View, seq: int) -> None:
        bit = 1 << seq
        update = Message(Kind.PUSH, 1, view.number, 1, worker=0, seq=seq, payload=bit)
        server.handle(0, update)

    server.handle(0, Message(Kind.LOAD, 1, 1, 1, worker=0, seq=1, payload=0))
    server.handle(3, proposed(filled))
    push(first, 2)
    server.handle(3, proposed(again))
    # Were this one applied, the one that was ignored would count as a repetition.
    push(first, 3)
    server.handle(3, proposed(again, Kind.VIEW))
    for seq in (2, 3):
        push(again, seq)
    assert server.replicas[1].shard.parts[1, 0].value == 0b1100


def test_a_server_that_stops_tells_workers_though_it_holds_no_shard() -> None:
    world = World(1, ASP, workers=2, servers=3)
    spare = ServerMachine(5, (0, 1), world.view, world.make)
    assert not spare.replicas
    left_out = Message(Kind.UNMANAGED, flags=EXCLUDED)
    spare.handle(2, left_out)
    told = [to for to, message in spare.out if message.kind is Kind.UNMANAGED]
    assert spare.has_stopped and {0, 1} <= set(told)
    spare.out.clear()
    spare.lose(3)
    assert not spare.out


def recalled(view: View) -> Message:
    return Message(Kind.VIEW_REPLY, view=view.number, payload=view.to_bytes())


def sent(voter: Voter, kind: Kind) -> list[int]:
    """The servers that get a message of this kind now."""
    out, voter.out[:] = list(voter.out), []
    return [to for to, message in out if message.kind is kind]


def test_a_successor_is_the_first_server_of_its_own_view() -> None:
    view = first_view((3, 4, 5), 1)
    voter = Voter(4, view)
    voter.lose(3, True)
    assert sent(voter, Kind.VIEW_QUERY) == [5]
    # The lost manager did not reach this server.
    voter.handle(5, recalled(view._replace(number=2, servers=(3, 5))))
    assert voter.manager is not None and voter.manager.view.servers == (4, 5)


def test_a_successor_asks_servers_that_only_a_proposal_counts() -> None:
    view = first_view((3, 4, 5), 1)
    voter = Voter(4, view)
    voter.lose(3, True)
    voter.handle(5, recalled(view._replace(number=2, servers=(3, 4, 5, 6))))
    assert sent(voter, Kind.VIEW_QUERY) == [5, 6] and voter.manager is None
    voter.handle(6, recalled(view._replace(number=3, servers=(3, 4, 5, 6))))
    assert voter.manager is not None
    assert (voter.manager.view.number, voter.manager.view.servers) == (4, (4, 5, 6))


def test_a_successor_does_not_wait_for_a_server_that_was_lost_ahead_of_its_proposal() -> None:
    world = World(1, ASP, workers=3, servers=3)
    server = world.servers[4]
    view = server.view
    server.lose(6)
    server.lose(3)
    server.handle(5, recalled(view._replace(number=2, servers=(3, 4, 5, 6))))
    assert server.voter.manager is not None
    assert server.voter.manager.view.servers == (4, 5)


def test_a_server_counts_as_filled_once_the_one_before_it_has_all() -> None:
    world = World(1, ASP, workers=3, servers=3)
    out: list[tuple[int, Message]] = []
    server = Replica(4, 0, world.make(0), out, [])
    server.adopt(2, (3,), 4)
    server.adopt(3, (3, 4), 5)
    server.handle(5, Message(Kind.SYNC, view=3))
    assert not any(message.kind is Kind.SYNCED for _, message in out)
    for lsn in (1, 1):
        server.handle(3, Message(Kind.SYNCED, view=3, lsn=lsn))
    assert [to for to, message in out if message.kind is Kind.SYNCED] == [5]
