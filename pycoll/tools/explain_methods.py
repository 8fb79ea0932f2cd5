"""The text of ``pycoll explain --gradients``: every method for a file of gradients."""

from __future__ import annotations

from pathlib import Path

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.compare import SERVING, Network, compare, read_gradients
from pycoll.tools.codec_words import codec_of
from pycoll.tools.explain import Question


def methods_text(question: Question, path: Path) -> str:
    """The table of all methods on the hosts and links of the question.

    It tries servers on the workers, and as many servers apart as the question has, by default one
    for each host; the question's codecs are further methods. Raises InvalidArgumentError for
    options that exclude each other and for a file that has no gradients.
    """
    if question.rank is not None or question.measured or question.picture is not None:
        raise InvalidArgumentError(
            "--gradients excludes --rank, --measured and --plot: it compares methods, not plans"
        )
    links = question.parameters()
    network = Network(
        links.across.alpha,
        1 / links.across.beta,
        links.inside.alpha,
        1 / links.inside.beta,
        codecs=links.codecs,
        serving=SERVING._replace(beta=links.across.gamma),
    )
    per_host = question.local_size or 1
    counts = [0, question.servers or question.hosts]
    found = compare(
        read_gradients(path),
        network,
        hosts=question.hosts,
        per_host=per_host,
        servers=counts,
        codecs=[codec_of(word) for word in question.compress],
    )
    head = f"{question.hosts} hosts of {per_host} ranks; values: {links.origin}"
    return f"{head}\n{found.explain()}"
