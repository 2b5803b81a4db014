"""Tests of aiocomm.rendezvous."""
