"""Generates keyed random numbers: each depends on its key, not on how many were drawn before it.

docs/spec/provider.md §21. Equal seed, topic, subject and number give the equal draw in every process. This module must
not keep state.
"""

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_Z_P99 = _NORMAL.inv_cdf(0.99)
_MANTISSA_BITS = 53


@dataclass(frozen=True, slots=True)
class KeyedDraws:
    """All draws of one seed."""

    seed: int

    def uniform(self, topic: str, subject: str, number: int) -> float:
        """Return a number strictly between 0 and 1."""
        key = f"{self.seed}\x1f{topic}\x1f{subject}\x1f{number}".encode()
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> (64 - _MANTISSA_BITS)
        return (bits + 0.5) / 2.0**_MANTISSA_BITS

    def happens(self, probability: float, topic: str, subject: str, number: int) -> bool:
        """Return whether something of this probability happens this time."""
        return probability > 0 and self.uniform(topic, subject, number) < probability

    def normal(self, topic: str, subject: str, number: int) -> float:
        """Return a draw of the standard normal distribution."""
        return _NORMAL.inv_cdf(self.uniform(topic, subject, number))

    def exponential(self, mean: float, topic: str, subject: str, number: int) -> float:
        """Return a draw of the exponential distribution with this mean."""
        return -mean * math.log(self.uniform(topic, subject, number))

    def log_normal(self, median: float, p99: float, topic: str, subject: str, number: int) -> float:
        """Return a draw of the log-normal distribution with this median and 99th percentile."""
        sigma = math.log(p99 / median) / _Z_P99
        return median * math.exp(sigma * self.normal(topic, subject, number))

    def token(self, topic: str, subject: str, number: int) -> str:
        """Return 16 hexadecimal digits."""
        key = f"{self.seed}\x1f{topic}\x1f{subject}\x1f{number}".encode()
        return hashlib.blake2b(key, digest_size=8).hexdigest()
