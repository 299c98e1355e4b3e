"""What a build of the image raises."""


class ImageFault(Exception):
    """The image cannot be built; the message says why and what to do."""
