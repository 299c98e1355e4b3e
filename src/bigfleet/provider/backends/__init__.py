"""Contains the shipped backends: simulated, partitioned, exec, libvirt, aws, fake, fault, multiplex."""
