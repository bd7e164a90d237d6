package recipe

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/input/recipe/strict"
)

// expand gives the arguments of a command the names of their keys, as transformers' HfArgumentParser does: argparse
// takes the beginning of a name for the name, and no_ before a switch turns it off. An argument that may be of several
// keys is refused, as argparse refuses it.
func (k *Kind) expand(d *strict.Document, keys ...strict.Keys) error {
	if !k.Abbreviates || !k.isCommand(d.Root) {
		return nil
	}
	known := map[string]bool{}
	for _, some := range keys {
		for name := range some {
			known[name] = true
		}
	}
	changed := false
	for i, m := range d.Root.Members {
		if known[m.Name] {
			continue
		}
		name, err := beginning(d, m, known)
		if err != nil {
			return err
		}
		if of, isNo := strings.CutPrefix(name, "no_"); isNo && !known[name] && known[of] {
			off := *strict.Of(false)
			off.At = m.Value.At
			name, d.Root.Members[i].Value = of, &off
		}
		d.Root.Members[i].Name = name
		changed = changed || name != m.Name
	}
	if changed {
		d.Root.Members = lastOfEach(d.Root.Members)
	}
	return nil
}

// isCommand reports whether a document is of the arguments of a command.
func (k *Kind) isCommand(root *strict.Value) bool {
	return slices.ContainsFunc(slices.Collect(maps.Values(k.Commands)), func(mark string) bool {
		m := root.Member(mark)
		return m != nil && m.Value.Kind == 't'
	})
}

// beginning returns the key that the name of an argument begins, or that name.
func beginning(d *strict.Document, m strict.Member, known map[string]bool) (string, error) {
	var meant []string
	for name := range known {
		for _, option := range []string{name, "no_" + name} {
			if option == m.Name {
				return option, nil
			}
			if strings.HasPrefix(option, m.Name) && (option == name || m.Value.Kind == 't') {
				meant = append(meant, option)
			}
		}
	}
	slices.Sort(meant)
	switch len(meant) {
	case 0:
		return m.Name, nil
	case 1:
		return meant[0], nil
	}
	return "", d.Inputf(m.At, "--%s begins the names of %d arguments, and the program refuses it", m.Name, len(meant)).
		WithHint("expected " + fault.OneOf(meant[:min(len(meant), 4)]...))
}

// lastOfEach returns the last argument of each name, as it counts.
func lastOfEach(members []strict.Member) (kept []strict.Member) {
	members = slices.Clone(members)
	slices.SortStableFunc(members, func(a, b strict.Member) int { return cmp.Compare(a.At, b.At) })
	for i, m := range members {
		again := func(later strict.Member) bool { return later.Name == m.Name }
		if !slices.ContainsFunc(members[i+1:], again) {
			kept = append(kept, m)
		}
	}
	return kept
}
