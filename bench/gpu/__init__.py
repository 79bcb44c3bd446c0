"""The kernels that ``bench.gpu_report`` measures: inputs, costs and float64 references.

Inputs are drawn on the device. Rows outside of layouts and cache positions past a request's length
are NaN. Nothing here reads a clock, so everything here runs wherever the kernels do.
"""
