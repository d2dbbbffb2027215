"""Small data sets in the formats of MovieLens, SASRec's "Games" and Criteo, in which
there is something to learn.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path

RAW = 2**53 + 7
NUM_USERS, NUM_MOVIES, NUM_KINDS, LIKED = 300, 60, 5, 7


def movielens(folder: Path) -> Path:
    """Users and movies of five kinds.

    A user watches movies of the user's kind in their order, and likes them.

    After each of them, the user watches the movie with the next number, which is of
    another kind, and dislikes it. All users rate at the same time. Ids are large, and
    those of users negative.
    """
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    users = [
        f"{-RAW * user - 1}\t{rng.randint(15, 70)}\t{rng.choice('MF')}\tother\tZ{rng.randint(0, 50)}\n"
        for user in range(NUM_USERS)
    ]
    movies = [
        f"{RAW + movie}\tTitle"
        f" {movie}\t{1950 + movie}\t{rng.choice(['', 'Drama', 'War Comedy'])}\n"
        for movie in range(NUM_MOVIES)
    ]
    ratings = []
    for user in range(NUM_USERS):
        first = rng.randrange(0, NUM_MOVIES, NUM_KINDS) + user % NUM_KINDS
        watched = [
            ((first + NUM_KINDS * place + other) % NUM_MOVIES, 1 if other else 5)
            for place in range(LIKED)
            for other in range(2)
        ]
        for place, (movie, rating) in enumerate(watched):
            ratings.append(
                (
                    1000 * place + user,
                    (
                        f"{-RAW * user - 1}\t{RAW + movie}\t{rating}\t{1000 * place + user}\n"
                    ),
                )
            )
    rng.shuffle(ratings)
    (folder / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        + "".join(users)
    )
    (folder / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        + "".join(movies)
    )
    with gzip.open(folder / "ml-100k.inter.gz", "wt") as file:
        file.write(
            "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
            + "".join(r for _, r in ratings)
        )
    return folder


def interactions(path: Path, users: int = 2000) -> Path:
    """Users of up to nine items.

    Each item is followed by the one with the next number of its kind.
    """
    rng = random.Random(0)
    lines = []
    for user in range(users):
        first = rng.randrange(NUM_MOVIES)
        items = [
            (first + NUM_KINDS * place) % NUM_MOVIES for place in range(1 + user % 9)
        ]
        lines += [f"{user + 1} {RAW + item}\n" for item in items]
    path.write_text("".join(lines))
    return path


def criteo(path: Path, rows: int = 8000) -> Path:
    """Rows whose label is whether the ids C1 and C2 are large together."""
    rng = random.Random(0)
    lines = []
    for _ in range(rows):
        ids = [rng.randrange(20) for _ in range(26)]
        clicked = ids[0] + ids[1] > 20
        counts = [
            str(rng.randrange(-2, 50)) if rng.random() < 0.8 else "" for _ in range(13)
        ]
        words = [
            f"{id_ + 0xFFFFFF00:08x}" if rng.random() < 0.9 or place < 2 else ""
            for place, id_ in enumerate(ids)
        ]
        lines.append("\t".join([str(int(clicked)), *counts, *words]) + "\n")
    path.write_text("".join(lines))
    return path
