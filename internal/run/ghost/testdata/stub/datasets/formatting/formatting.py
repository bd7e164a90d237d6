from collections.abc import MutableMapping


class LazyDict(MutableMapping):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, key):
        return self.data[key]

    def __setitem__(self, key, value):
        self.data[key] = value

    def __delitem__(self, key):
        del self.data[key]

    def __iter__(self):
        return iter(self.data)

    def __len__(self):
        return len(self.data)


class LazyRow(LazyDict):
    pass


class LazyBatch(LazyDict):
    pass
