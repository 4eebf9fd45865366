"""Looks at the machine for `prep doctor`: libraries, devices, memory, the disk, missing extras."""
