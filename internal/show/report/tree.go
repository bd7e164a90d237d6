package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/host"
)

// branch is a group of cores in the tree of a machine, or several equal groups.
type branch struct {
	labels   []label
	count    int // how many equal groups each parent has
	total    int // how many equal groups the machine has
	cores    []host.Core
	devices  []string
	children []*branch
}

// label names groups of one level: "NUMA node", 0, "64.0 GiB".
type label struct {
	what   string
	ids    []int // empty for groups without a name
	detail string
}

// level assigns a core to a group: the group's key and its label.
type level func(host.Core) (key string, name label)

// machineTree arranges the cores as a tree. The nesting of the levels differs between machines: a node may hold many
// caches, and with sub-NUMA clustering a cache may span several nodes. The level with the fewest groups is the
// outermost.
func machineTree(h *host.Host) Tree {
	levels := levelsOf(h)
	slices.SortStableFunc(levels, func(a, b level) int { return cmp.Compare(a.groups(h), b.groups(h)) })
	root := grow(h.Cores, levels)
	lost := root.attach(h)
	root.collapse()
	branches := []*branch{root}
	if len(root.labels) == 0 {
		branches, lost = root.children, append(root.devices, lost...)
	}
	branches = append(branches, memoryBranches(h)...)
	if len(lost) > 0 {
		branches = append(branches, &branch{devices: lost,
			labels: []label{{what: "attached to no CPUs in particular"}}})
	}
	var tree Tree
	for _, b := range branches {
		tree = append(tree, b.node())
	}
	return tree
}

func levelsOf(h *host.Host) []level {
	levels := []level{
		func(c host.Core) (string, label) {
			id := h.Packages[c.Package].ID
			if id < 0 {
				return fmt.Sprint(c.Package), label{what: "package"}
			}
			return fmt.Sprint(c.Package), label{"package", []int{id}, ""}
		},
		func(c host.Core) (string, label) {
			if c.Die < 0 {
				return "", label{}
			}
			id := h.Dies[c.Die].ID
			if id < 0 { // the firmware gives none
				return fmt.Sprint(c.Die), label{what: "die"}
			}
			return fmt.Sprint(c.Die), label{"die", []int{id}, ""}
		},
		func(c host.Core) (string, label) { return fmt.Sprint(c.Nodes), nodeLabel(h, c.Nodes) },
		func(c host.Core) (string, label) {
			if c.Cache < 0 {
				return "", label{}
			}
			cache := h.Caches[c.Cache]
			return fmt.Sprint(c.Cache), label{what: fmt.Sprintf("L%d", cache.Level), detail: sizeText(cache.Size)}
		},
	}
	if len(h.Kinds) > 1 {
		levels = append(levels, func(c host.Core) (string, label) {
			kind := h.Kinds[c.Kind]
			return fmt.Sprint(c.Kind), label{what: kind.Name, detail: fmt.Sprintf("speed %.2f", kind.Capacity)}
		})
	}
	return levels
}

func nodeLabel(h *host.Host, ids []int) label {
	if len(h.Nodes) == 0 {
		return label{}
	}
	if len(ids) == 0 {
		return label{what: "no NUMA node"}
	}
	size, details := ledger.Bytes(0), []string{}
	allowed := true
	for _, id := range ids {
		size += h.Node(id).MemTotal
		allowed = allowed && h.Node(id).Allowed
	}
	if size > 0 {
		details = append(details, size.String())
	}
	switch {
	case h.Node(ids[0]).Class == host.NodeCPUs:
		details = append(details, "no memory")
	case !allowed:
		details = append(details, "memory not allowed")
	}
	if len(ids) > 1 {
		details = append(details, "listing the same CPUs")
	}
	return label{"NUMA node", ids, strings.Join(details, ", ")}
}

func sizeText(size ledger.Bytes) string {
	if size == 0 {
		return ""
	}
	return size.String()
}

// groups returns the number of groups of the level.
func (l level) groups(h *host.Host) int {
	keys := map[string]bool{}
	for _, c := range h.Cores {
		key, _ := l(c)
		keys[key] = true
	}
	return len(keys)
}

// grow makes the tree of the cores. A level that does not divide the cores shares a line with the level above.
func grow(cores []host.Core, levels []level) *branch {
	b := &branch{count: 1, total: 1, cores: cores}
	for i, l := range levels {
		keys, groups, labels := []string{}, map[string][]host.Core{}, map[string]label{}
		for _, c := range cores {
			key, name := l(c)
			if groups[key] == nil {
				keys = append(keys, key)
			}
			groups[key], labels[key] = append(groups[key], c), name
		}
		if len(keys) == 1 {
			if labels[keys[0]].what != "" {
				b.labels = append(b.labels, labels[keys[0]])
			}
			continue
		}
		for _, key := range keys {
			child := grow(groups[key], levels[i+1:])
			if labels[key].what != "" {
				child.labels = append([]label{labels[key]}, child.labels...)
			}
			b.children = append(b.children, child)
		}
		break
	}
	return b
}

// attach puts every device on the smallest branch that holds all CPUs near the device. It returns the devices for
// which no branch is known.
func (b *branch) attach(h *host.Host) (lost []string) {
	hang := func(device host.Device, text string) {
		if device.CPUs.IsEmpty() {
			lost = append(lost, text)
			return
		}
		at := b
		for within := b; within != nil; {
			at = within
			within = nil
			for _, child := range at.children {
				if device.CPUs.IsSubsetOf(child.cpus()) {
					within = child
				}
			}
		}
		at.devices = append(at.devices, text)
	}
	for _, gpu := range h.GPUs {
		text := "GPU " + gpu.Address
		if gpu.Vendor != "" {
			text += fmt.Sprintf(" (%s:%s)", gpu.Vendor, gpu.Product)
		}
		hang(gpu, text)
	}
	for _, nic := range h.NICs {
		hang(nic, strings.TrimSpace(fmt.Sprintf("network %s %s", nic.Address, strings.Join(nic.Names, " "))))
	}
	return lost
}

func (b *branch) cpus() cpuset.CPUSet {
	ids := []int{}
	for _, c := range b.cores {
		ids = append(ids, c.Siblings.UnsortedList()...)
	}
	return cpuset.New(ids...)
}

func (b *branch) usable() cpuset.CPUSet {
	ids := []int{}
	for _, c := range b.cores {
		ids = append(ids, c.Usable.UnsortedList()...)
	}
	return cpuset.New(ids...)
}

// shape returns a key that is equal for branches that differ only in ids.
func (b *branch) shape() string {
	parts := []string{fmt.Sprint(b.count)}
	for _, l := range b.labels {
		parts = append(parts, l.what, l.detail)
	}
	parts = append(parts, b.coresText(), coresText(b.cores), strings.Join(b.devices, " "))
	for _, child := range b.children {
		parts = append(parts, "(", child.shape(), ")")
	}
	return strings.Join(parts, ";")
}

// few groups are shown one by one.
const few = 4

// collapse merges equal neighbours where there are many.
func (b *branch) collapse() {
	for _, child := range b.children {
		child.collapse()
	}
	merged := []*branch{}
	for start := 0; start < len(b.children); {
		end, shape := start+1, b.children[start].shape()
		for end < len(b.children) && b.children[end].shape() == shape {
			end++
		}
		limit := few
		if !b.children[start].named() {
			limit = 1 // names would not be lost
		}
		if end-start > limit && len(b.children[start].devices) == 0 {
			one := b.children[start]
			for _, other := range b.children[start+1 : end] {
				one.merge(other)
			}
			one.count *= end - start
			one.forgetNames()
			merged = append(merged, one)
		} else {
			merged = append(merged, b.children[start:end]...)
		}
		start = end
	}
	b.children = merged
}

// named reports whether the branch, or a branch below it, has a name.
func (b *branch) named() bool {
	return slices.ContainsFunc(b.labels, func(l label) bool { return len(l.ids) > 0 }) ||
		slices.ContainsFunc(b.children, (*branch).named)
}

// merge adds an equal branch.
func (b *branch) merge(other *branch) {
	b.total += other.total
	b.cores = append(slices.Clone(b.cores), other.cores...)
	for i := range b.labels {
		b.labels[i].ids = append(slices.Clone(b.labels[i].ids), other.labels[i].ids...)
	}
	for i := range b.children {
		b.children[i].merge(other.children[i])
	}
}

// forgetNames drops the names below several branches shown as one: the reader could not tell which name belongs to
// which branch.
func (b *branch) forgetNames() {
	for _, child := range b.children {
		for i := range child.labels {
			child.labels[i].ids = nil
		}
		child.forgetNames()
	}
	b.collapse()
}

// node returns the branch as it is shown.
func (b *branch) node() Node {
	n := Node{Text: b.text()}
	for _, device := range b.devices {
		n.Children = append(n.Children, Node{Text: device})
	}
	if !b.inline() {
		for _, child := range b.children {
			n.Children = append(n.Children, child.node())
		}
	}
	return n
}

// inline reports whether there is one line below, with the same CPUs.
func (b *branch) inline() bool {
	return len(b.children) == 1 && len(b.children[0].children) == 0 && len(b.children[0].devices) == 0
}

func (b *branch) text() string {
	text := b.name()
	if b.inline() {
		text += ", " + b.children[0].name()
	}
	if len(b.cores) == 0 {
		return text
	}
	each := ""
	if b.total > 1 {
		each = "each "
	}
	text += ": " + each + b.coresText()
	if b.total > b.count { // the branch above shows the CPUs
		return text
	}
	text += fmt.Sprintf(", CPUs %s", b.cpus())
	switch usable := b.usable(); {
	case usable.IsEmpty():
		text += ", not usable"
	case usable.Size() < b.cpus().Size():
		text += fmt.Sprintf(", usable %s (%s)", usable, coresText(b.cores))
	}
	return text
}

func (b *branch) name() string {
	names := []string{}
	for _, l := range b.labels {
		name := l.what
		if len(l.ids) > 0 {
			if len(l.ids) > 1 {
				name += "s"
			}
			name += " " + idsText(l.ids)
		}
		if l.detail != "" {
			name += " (" + l.detail + ")"
		}
		names = append(names, name)
	}
	if len(names) == 0 {
		names = append(names, "machine")
	}
	text := strings.Join(names, ", ")
	if b.count > 1 && len(b.labels) > 0 && len(b.labels[0].ids) > 0 {
		text = fmt.Sprintf("%d alike: %s", b.count, text)
	} else if b.count > 1 {
		text = fmt.Sprintf("%d × %s", b.count, text)
	}
	return text
}

// idsText returns the ids as a list, shortened where it is long.
func idsText(ids []int) string {
	text := cpuset.New(ids...).String()
	if len(text) > 30 {
		return text[:strings.LastIndexByte(text[:30], ',')] + ",…"
	}
	return text
}

// coresText counts the cores of one such group.
func (b *branch) coresText() string {
	least, most := b.cores[0].Siblings.Size(), 0
	for _, c := range b.cores {
		least, most = min(least, c.Siblings.Size()), max(most, c.Siblings.Size())
	}
	text := counted(len(b.cores)/b.total, "core")
	switch {
	case least < most:
		text += fmt.Sprintf(" of %d to %d threads", least, most)
	case most > 1:
		text += fmt.Sprintf(" of %d threads", most)
	}
	return text
}

// memoryBranches returns the nodes without CPUs.
func memoryBranches(h *host.Host) []*branch {
	branches := []*branch{}
	last := ""
	for _, node := range h.Nodes {
		if !node.CPUs.IsEmpty() {
			continue
		}
		details := []string{string(node.Class)}
		if node.MemTotal > 0 {
			details = append(details, node.MemTotal.String())
		}
		switch {
		case node.Class == host.NodeGPU:
			details = append(details, "never used for host state")
		case node.Class == host.NodeEmpty:
		case !node.Allowed:
			details = append(details, "memory not allowed")
		case slices.Contains(h.MemoryNodes(), node.ID):
			details = append(details, "used: no node with CPUs is allowed")
		default:
			details = append(details, "not used unless asked")
		}
		detail := strings.Join(details, ", ")
		if detail != last {
			branches = append(branches, &branch{count: 1, total: 1,
				labels: []label{{what: "NUMA node", detail: detail}}})
		}
		last = detail
		ids := &branches[len(branches)-1].labels[0].ids
		*ids = append(*ids, node.ID)
	}
	return branches
}
