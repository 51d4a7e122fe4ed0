"""Turns trajectories into samples, plans optimiser steps and micro-batches, and packs samples into them."""
