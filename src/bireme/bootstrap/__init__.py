"""How the ranks of one host find each other: who is who, and small messages with descriptors."""

from bireme.bootstrap.discover import join
from bireme.bootstrap.hub import Hub
from bireme.bootstrap.rendezvous import Rendezvous

__all__ = ["Hub", "Rendezvous", "join"]
