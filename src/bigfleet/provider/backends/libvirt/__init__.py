"""Implements a backend over hosts that run libvirt: each machine is a virtual machine.

docs/spec/libvirt-provider.md. `backend.py` is what the kit calls; only `binding.py` imports the libvirt binding.
"""
