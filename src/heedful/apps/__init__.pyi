from . import course as course
from . import plot as plot
