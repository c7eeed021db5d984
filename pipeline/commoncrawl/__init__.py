"""Common Crawl: hosts by rank, captures by index, pages by ranged reads, links by WAT files (docs/commoncrawl.md)."""
