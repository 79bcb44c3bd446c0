"""Levenberg-Marquardt for a handful of positive parameters, on logarithms, with a robust loss."""

from collections.abc import Callable

import numpy as np

Vector = np.ndarray
STEPS = 60
ENOUGH = 1e-6  # relative gain of a step below which it was the last


def minimise(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """The x near ``start`` with the least sum of ``2 (sqrt(1 + r^2) - 1)``, which grows like r^2
    for small residuals and like 2 |r| for large ones, so that a few bad records do not rule."""
    x, damping = start.astype(float), 1e-2
    r = residuals(x)
    for _ in range(STEPS):
        jacobian = _jacobian(residuals, x, r)
        weight = 1 / np.sqrt(1 + r * r)
        normal = jacobian.T @ (jacobian * weight[:, None])
        step = -np.linalg.solve(
            normal + damping * np.diag(np.diag(normal) + 1e-12), jacobian.T @ (weight * r)
        )
        candidate = residuals(x + step)
        if _loss(candidate) < _loss(r):
            gain = _loss(r) - _loss(candidate)
            x, r, damping = x + step, candidate, damping / 3
            if gain < ENOUGH * _loss(r):
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return x


def _loss(r: Vector) -> float:
    return float(np.sum(np.sqrt(1 + r * r) - 1))


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, r: Vector) -> Vector:
    columns = []
    for i in range(len(x)):
        moved = x.copy()
        moved[i] += 1e-6
        columns.append((residuals(moved) - r) / 1e-6)
    return np.stack(columns, axis=1)
