from . import formatting
