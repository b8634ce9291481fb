"""Shows the reports that saves have left, as one HTML page without network.

It needs no torch. ``robust-dcp report`` calls ``read_reports`` and ``render_page``.
"""
