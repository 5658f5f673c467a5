# What heedful.apps.label exports, and from where.
from .exporting import ExportOptions as ExportOptions
from .exporting import export_project as export_project
from .importing import ImportOptions as ImportOptions
from .project import NotHeldError as NotHeldError
from .project import Project as Project
from .records import Candidate as Candidate
from .records import Item as Item
from .records import item_id as item_id
from .statistics import project_statistics as project_statistics
