"""Packs pods onto machines as Karpenter does, to compare what a fleet costs with what a packer would pay."""
