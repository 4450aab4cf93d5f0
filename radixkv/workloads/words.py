"""Texts of a wanted length in tokens, for servers whose tokenizer nobody here knows.

Each number becomes a word that is, with the space before it, one token for every common tokenizer
trained on English; words do not merge across spaces. So equal numbers give equal tokens, and a text
has about as many tokens as it has words; how many exactly, only the server says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_LIST = """
about above across action after again against age air all almost also always among animal answer
area art away back bank base bed best between big bird black blood blue board boat body book both
box bring building business call car care case cause center certain change child church city class
clear close cold college color come common company control corner cost could country course court
current cut dark data day dead deal death deep degree desk door down draw dream drive early earth
east easy edge education effect effort end energy enough even evening ever every example experience
eye face fact fall family far farm fast father field figure final find fine fire first fish floor
follow food foot force foreign form four free friend front full game garden general girl
"""
WORDS = np.array(_LIST.split())


def words_of(numbers: npt.ArrayLike) -> str:
    """A text with a word for each number; the same number is the same word everywhere."""
    mixed = np.asarray(numbers).astype(np.uint64)
    # splitmix64's last steps: neighbouring numbers become unrelated words.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return " ".join(WORDS[mixed % np.uint64(len(WORDS))].tolist())
