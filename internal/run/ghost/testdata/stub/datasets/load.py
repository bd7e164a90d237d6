def load_dataset(path, *arguments, **options):
    raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)")


def load_from_disk(path, *arguments, **options):
    raise FileNotFoundError(f"Directory {path} not found")
