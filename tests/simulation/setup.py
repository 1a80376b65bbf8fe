"""The constants of histories: caches, prompts and their texts, and each seed's choices."""

import random
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from kvdepot.config import Demotion
from kvdepot.features.blend.messages import SEGMENT, SEGMENT_NAME_BYTES
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, PrefixHasher
from kvdepot.layout import GroupKind, Part
from kvdepot.wire import messages as m
from simulation.memory import NUM_RECORDS, PAGE

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
CHUNK_TOKENS: Final = 256  # the fewest tokens that single flight waits for
LETTER_TOKENS: Final = CHUNK_TOKENS // 2  # each letter of a prompt's text stands for this many tokens
_FULL: Final = m.GroupShape(FULL, CHUNK_TOKENS)
_WINDOW: Final = m.GroupShape(WINDOW, CHUNK_TOKENS, 3 * CHUNK_TOKENS)
SPECS: Final = (
    m.CacheSpec(CHUNK_TOKENS, (_FULL,), "plain"),
    m.CacheSpec(CHUNK_TOKENS, (structs.replace(_FULL, layers=2),), "two ranks"),
    m.CacheSpec(CHUNK_TOKENS, (_FULL, _WINDOW, m.GroupShape(STATE, CHUNK_TOKENS)), "hybrid"),
    m.CacheSpec(CHUNK_TOKENS, (_WINDOW,), "only a window"),
)
_CUT: Final = (  # each replaces the second of `SPECS` in a quarter of its histories
    m.CacheSpec(CHUNK_TOKENS, (structs.replace(_FULL, heads=4),), "heads"),
    m.CacheSpec(CHUNK_TOKENS, (structs.replace(_FULL, layers=2, heads=2),), "layers and heads"),
)
NUM_CHUNKS: Final = 4
_RANKS: Final = (((1, 0), (2, 0), (2, 1), (4, 2)), ((1, 0), (4, 0), (4, 1), (4, 2), (4, 3)))
"""The number of ranks and the own rank of each worker of a cut cache: a rank of each size, or every rank of four.

With all ranks of all sizes in one history, each worker would do too little.
"""


def _prompt(text: str, tenant: str) -> KeyRun:
    """Return the chunks of a text. A leftover letter is a tail, an incomplete last chunk."""
    hasher, letters = PrefixHasher(Namespace("model", tenant=tenant), 2), [ord(letter) for letter in text]
    hasher.extend(letters)
    whole = hasher.run()
    tail = hasher.tail(whole.num_chunks, letters[-1:]) if len(text) % 2 else b""
    return KeyRun(whole.digests + tail, 0, whole.parent, tenant)


# Two tenants have the same texts. Texts differ from the third chunk on, and two have the last chunk in common.
TEXTS: Final = ("abcdefgh", "abcdefgh", "abcdwxgh", "abcdwxgh", "abcdefg", "abcdefg", "abyzefgh")
PROMPTS: Final = tuple(_prompt(text, f"tenant-{number % 2}") for number, text in enumerate(TEXTS))
NAMES: Final = {
    PROMPTS[n].digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]: f"{'abcdefg'[n]}{i}"
    for n in reversed(range(len(PROMPTS)))
    for i in range(NUM_CHUNKS)
}
ABOVE: Final = {
    prompt.digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]: prompt.digests[(i - 1) * DIGEST_BYTES : i * DIGEST_BYTES]
    for prompt in PROMPTS
    for i in range(1, NUM_CHUNKS)
}
"""The chunk before each chunk."""

_SEGMENT_ENDS: Final = "cfxgh"


def segments_of(text: str, tenant: str) -> bytes:
    """Return the packed segments of a text. Equal letters have the same name at any position."""
    packed, first = b"", 0
    for place, letter in enumerate(text, 1):
        if letter in _SEGMENT_ENDS:
            name = f"{text[first:place]} {tenant}".encode()[:SEGMENT_NAME_BYTES]
            packed += SEGMENT.pack(name, first * LETTER_TOKENS, (place - first) * LETTER_TOKENS)
            first = place
    return packed


DEMOTIONS: Final = (None, Demotion.STORE, Demotion.STORE, Demotion.REUSE, Demotion.EVICT)


def part_of(group: m.GroupShape, worker: int, ranks: tuple[tuple[int, int], ...]) -> Part:
    """Return a worker's part of a group. If there are two layers, an engine of several ranks has two stages."""
    if group.heads == 1:
        return Part(worker % 2 if group.layers > 1 else 0)
    size, rank = ranks[worker]
    held = max(1, group.layers // size)
    size = size * held // group.layers  # ranks of a stage
    stage, rank = divmod(rank, size)
    return Part(stage * held, held, rank * group.heads // size, max(1, group.heads // size))


@dataclass
class Setup:
    """The constants of a history."""

    spec: m.CacheSpec
    num_pages: int
    ready_pages: int  # pages that have memory when the first server starts
    entry_bytes: tuple[int, ...]  # by group, for one cell
    policy: str
    demotion: Demotion | None
    quotas: dict[str, int]
    has_history: bool  # the tier has every chunk from the start
    is_slow: bool  # reads of the tier hang
    num_prompts: int  # the first prompts are used
    is_roomy: bool  # several whole prompts stay, so that blends find them
    ranks: tuple[tuple[int, int], ...]  # of the workers, if their cache is cut; also their number

    @classmethod
    def of_seed(cls, seed: int) -> "Setup":
        rng = random.Random(f"setup {seed}")
        quotas = {"tenant-0": 3 * PAGE} if rng.random() < 0.3 else {}
        is_roomy = rng.random() < 0.2
        spec, num_pages = (SPECS[0], 2 * NUM_RECORDS) if is_roomy else (rng.choice(SPECS), rng.randint(5, 20))
        if spec is SPECS[1] and seed % 2:
            spec = _CUT[seed // 2 % 2]
        num_prompts = len(PROMPTS) if is_roomy else rng.choice((3, len(PROMPTS)))  # with fewer, hits are more frequent
        policy = rng.choice(["lru", "arc", "auto"])
        ready_pages = rng.choice((num_pages, num_pages, rng.randint(0, num_pages)))
        large, small = rng.choice(((2 * PAGE, PAGE), (PAGE + 904, 1000)))  # entries of one and of two pages
        if spec.groups[0].heads > 1:
            large = PAGE
        entry_bytes = tuple(small if number == 1 else large for number in range(len(spec.groups)))
        demotion = rng.choice(DEMOTIONS)
        is_slow = demotion is not None and rng.random() < 0.4
        has_history = is_slow or rng.random() < 0.5
        return cls(
            spec,
            num_pages,
            ready_pages,
            entry_bytes,
            policy,
            demotion,
            quotas,
            has_history,
            is_slow,
            num_prompts,
            is_roomy,
            _RANKS[spec in _CUT and seed // 4 % 2],
        )
