package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"plimsoll/internal/machine/host"
)

// The classes of cores in a picture, with their words.
var coreKeys = []ganttKey{{"forward", "usable"}, {"copying-out", "usable in part"}, {otherColor, "not usable"}}

const (
	coresInRow = 48
	coreSize   = 13
	coreStep   = 15
)

// coresPicture draws the cores of a host: a row for each cache of a NUMA node, and a color for what this process may
// use.
func coresPicture(h *host.Host) Block {
	groups, names := coreGroups(h)
	if len(groups) == 0 {
		return Facts{}
	}
	p := &Picture{Title: "Cores", Width: pictureWidth}
	counts, y := make([]int, len(coreKeys)), 4.
	for i, cores := range groups {
		p.Texts = append(p.Texts, pictureText{pictureNames - 8, y + coreSize - 2, "end", names[i]})
		for k, c := range cores {
			if k > 0 && k%coresInRow == 0 {
				y += coreStep
			}
			kind := coreKind(c)
			counts[kind]++
			p.Boxes = append(p.Boxes, pictureBox{pictureNames + float64(k%coresInRow*coreStep), y, coreSize, coreSize,
				coreKeys[kind].Class, coreTitle(h, c, coreKeys[kind].Name)})
		}
		y += coreStep + 7
	}
	p.Height = int(y)
	var said []string
	for kind, n := range counts {
		if n > 0 {
			p.Legend = append(p.Legend, coreKeys[kind])
			said = append(said, fmt.Sprintf("%d %s", n, coreKeys[kind].Name))
		}
	}
	p.Label = counted(len(h.Cores), "core") + " in " + counted(len(groups), "group") + ": " + strings.Join(said, ", ")
	return p
}

// coreKind is a place in coreKeys.
func coreKind(c host.Core) int {
	switch {
	case c.Usable.IsEmpty():
		return 2
	case c.Whole():
		return 0
	}
	return 1
}

func coreTitle(h *host.Host, c host.Core, use string) string {
	text := fmt.Sprintf("CPUs %s: %s", c.Siblings, use)
	if !c.Usable.IsEmpty() && !c.Whole() {
		text += ", CPUs " + c.Usable.String()
	}
	if !c.Siblings.Intersection(h.Isolated).IsEmpty() {
		text += ", isolated"
	}
	return text
}

// coreGroups returns the cores by package, NUMA node and cache, with names of the groups. A name that is that of the
// row before is left out.
func coreGroups(h *host.Host) (groups [][]host.Core, names []string) {
	cores := slices.Clone(h.Cores)
	place := func(c host.Core) []int { return append([]int{c.Package}, append(slices.Clone(c.Nodes), c.Cache)...) }
	slices.SortStableFunc(cores, func(a, b host.Core) int {
		return cmp.Or(slices.Compare(place(a), place(b)), slices.Compare(a.Siblings.List(), b.Siblings.List()))
	})
	last := ""
	for i, c := range cores {
		if i == 0 || slices.Compare(place(c), place(cores[i-1])) != 0 {
			name := fmt.Sprintf("package %d", max(c.Package, h.Packages[c.Package].ID))
			if len(c.Nodes) > 0 {
				name += ", NUMA node " + strings.Trim(fmt.Sprint(c.Nodes), "[]")
			}
			groups = append(groups, nil)
			if name == last {
				names = append(names, "")
			} else {
				names = append(names, name)
			}
			last = name
		}
		groups[len(groups)-1] = append(groups[len(groups)-1], c)
	}
	return groups, names
}
