package host

import "plimsoll/internal/machine/arena"

// Local returns the host that this process runs on.
func Local() (*Host, error) { return Of("") }

// Of returns the host that this process runs on for an empty name. Otherwise it reads a host from the files of that
// name: see [Root].
func Of(name string) (*Host, error) {
	root, affinity, err := Root(name)
	if err != nil {
		return nil, err
	}
	h, err := Discover(root, affinity)
	if err == nil && name == "" {
		h.HugePages.Joins = arena.Joins()
		if limit, limited := (tree{root}).userThreads(); limited {
			h.ThreadLimits = append(h.ThreadLimits, limit)
		}
	}
	return h, err
}
