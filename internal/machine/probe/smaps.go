//go:build linux

package probe

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/machine/arena"
)

// Mapping is the memory of one name in /proc/PID/smaps, summed over all mappings of that name.
type Mapping struct {
	Name string
	// Proportional is the process's share of the resident pages (Pss). It counts hugetlb pages in full; the kernel's
	// Pss leaves them out.
	Proportional ledger.Bytes
	// Resident is the memory present in RAM (Rss), hugetlb pages included.
	Resident ledger.Bytes
	// Huge is the part of Resident on huge pages of either kind.
	Huge ledger.Bytes
}

// Memory is the memory of one process at one time.
type Memory struct {
	Mappings map[string]Mapping
	// PageTables is the kernel memory that maps the process (VmPTE). It belongs to no mapping, but counts against
	// memory limits.
	PageTables ledger.Bytes
	// Peak is the highest resident size so far (VmHWM), hugetlb pages not
	// included.
	Peak ledger.Bytes
}

// Proportional returns the sum of Proportional over the mappings for which keep holds.
func (m Memory) Proportional(keep func(name string) bool) ledger.Bytes {
	var sum ledger.Bytes
	for name, mapping := range m.Mappings {
		if keep(name) {
			sum += mapping.Proportional
		}
	}
	return sum
}

// Process measures a process; "self" is this one. The root is a file system with proc in it, so recorded processes
// can be read.
func Process(root fs.FS, pid string) (Memory, error) {
	m := Memory{Mappings: map[string]Mapping{}}
	err := read(root, "proc/"+pid+"/smaps", func(r io.Reader) error {
		return eachArea(r, func(a area) {
			sum := m.Mappings[a.name]
			sum.Name = a.name
			sum.Proportional += a.proportional
			sum.Resident += a.resident
			sum.Huge += a.huge
			m.Mappings[a.name] = sum
		})
	})
	if err == nil {
		err = read(root, "proc/"+pid+"/status", func(r io.Reader) (err error) {
			m.Peak, m.PageTables, err = parseStatus(r)
			return err
		})
	}
	return m, err
}

func read(root fs.FS, name string, parse func(io.Reader) error) error {
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := parse(f); err != nil {
		return fmt.Errorf("/%s: %w", name, err)
	}
	return nil
}

// area is one mapping of /proc/PID/smaps.
type area struct {
	name         string
	device       string // "00:01"
	hugetlb      bool
	resident     ledger.Bytes // hugetlb pages included
	proportional ledger.Bytes // hugetlb pages in full
	anonymous    ledger.Bytes // the part of resident that is a process's own: copies of a file's pages, too
	huge         ledger.Bytes
	locked       ledger.Bytes
}

func (a *area) add(key string, size ledger.Bytes) {
	switch key {
	case "Rss":
		a.resident += size
	case "Pss":
		a.proportional += size
	case "Anonymous":
		a.anonymous += size
	case "Locked":
		a.locked += size
	case "Shared_Hugetlb", "Private_Hugetlb":
		a.resident += size
		a.proportional += size
		a.huge += size
		a.hugetlb = a.hugetlb || size > 0
	case "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped":
		a.huge += size
	}
}

// eachArea reads the text of /proc/PID/smaps. Its layout is in the kernel's
// Documentation/filesystems/proc.rst. A mapping starts with a line
//
//	7f2c00000000-7f2c40000000 rw-s 00000000 00:01 1031  /memfd:name (deleted)
//
// and lines "Key: number kB" follow. Prometheus' procfs reads smaps_rollup
// only, which has no names.
func eachArea(r io.Reader, found func(area)) error {
	current, started := area{}, false
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		line := lines.Text()
		key, rest, isField := strings.Cut(line, ":")
		if !isField || strings.ContainsAny(key, " -") {
			next, ok := parseArea(line)
			if !ok {
				return fmt.Errorf("line %d: %q is neither a mapping nor a field of one", number, line)
			}
			if started {
				found(current)
			}
			current, started = next, true
			continue
		}
		if !started {
			return fmt.Errorf("line %d: a field before the first mapping", number)
		}
		size, isSize, err := parseKilobytes(rest)
		switch {
		case err != nil:
			return fmt.Errorf("line %d: %s: %w", number, key, err)
		case isSize:
			current.add(key, size)
		case key == "VmFlags": // THPeligible and the like are no sizes, either
			current.hugetlb = current.hugetlb || slices.Contains(strings.Fields(rest), "ht")
		}
	}
	if started {
		found(current)
	}
	return lines.Err()
}

// parseArea reads the first line of a mapping. The kernel appends " (deleted)" to files without a directory entry,
// which all memfds are.
func parseArea(line string) (area, bool) {
	fields := strings.Fields(line)
	if len(fields) < 5 || !strings.Contains(fields[0], "-") {
		return area{}, false
	}
	a := area{device: fields[3]}
	if len(fields) > 5 {
		// The name follows the inode and may contain spaces.
		for range 5 {
			line = strings.TrimLeft(line, " ")
			line = line[strings.IndexByte(line, ' ')+1:]
		}
		a.name = strings.TrimSuffix(strings.TrimLeft(line, " "), " (deleted)")
	}
	return a, true
}

// parseKilobytes reads " 123 kB". Other values are not sizes.
func parseKilobytes(text string) (size ledger.Bytes, isSize bool, err error) {
	number, isSize := strings.CutSuffix(text, " kB")
	if !isSize {
		return 0, false, nil
	}
	n, err := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
	if err == nil && (n < 0 || n > 1<<40) {
		err = fmt.Errorf("%d kB is out of range", n)
	}
	return ledger.Bytes(n) * ledger.KiB, true, err
}

// parseStatus reads the text of /proc/PID/status.
func parseStatus(r io.Reader) (peak, pageTables ledger.Bytes, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		key, rest, _ := strings.Cut(lines.Text(), ":")
		if key != "VmHWM" && key != "VmPTE" {
			continue
		}
		size, isSize, err := parseKilobytes(rest)
		if err != nil || !isSize {
			return 0, 0, fmt.Errorf("%s:%s: expected a number of kB", key, rest)
		}
		if key == "VmHWM" {
			peak = size
		} else {
			pageTables = size
		}
	}
	return peak, pageTables, lines.Err()
}

// sharedNames begin the names of shared memory. The kernel shows a shared mapping without a file as /dev/zero.
var sharedNames = []string{"/memfd:", "/dev/shm/", "/SYSV", "/dev/zero", "[anon_shmem"}

// kind returns the kind of the pages that the mapping shares with its file.
func (a area) kind(sharedDevices map[string]bool) samples.MappingKind {
	isShared := func(start string) bool { return strings.HasPrefix(a.name, start) }
	switch {
	case a.hugetlb:
		return samples.HugetlbMapping
	case sharedDevices[a.device], slices.ContainsFunc(sharedNames, isShared):
		return samples.SharedMapping
	case strings.HasPrefix(a.name, "/"):
		return samples.FileMapping
	}
	return samples.AnonymousMapping
}

// mappingTable adds mappings up by name and kind.
type mappingTable map[mappingKey]samples.Mapping

type mappingKey struct {
	name string
	kind samples.MappingKind
}

// add adds a mapping. A private mapping of a file has pages of the file, and copies that are the process's own: those
// are anonymous memory, so the mapping is divided.
func (t mappingTable) add(a area, sharedDevices map[string]bool) {
	kind := a.kind(sharedDevices)
	if copies := a.anonymous; copies > 0 && (kind == samples.FileMapping || kind == samples.SharedMapping) {
		own := area{resident: copies, proportional: min(copies, a.proportional), huge: min(copies, a.huge),
			locked: min(copies, a.locked)}
		t.put(mappingKey{a.name, samples.AnonymousMapping}, own)
		a.resident = max(0, a.resident-own.resident)
		a.proportional -= own.proportional
		a.huge -= own.huge
		a.locked -= own.locked
	}
	t.put(mappingKey{a.name, kind}, a)
}

func (t mappingTable) put(key mappingKey, a area) {
	m := t[key]
	m.Resident += a.resident
	m.Proportional += a.proportional
	m.Huge += a.huge
	m.Locked += a.locked
	m.Count++
	t[key] = m
}

const (
	// smallMapping is the size below which mappings are not worth a line each: a trainer maps a thousand libraries.
	smallMapping = ledger.MiB
	// otherMappings is the name of all small ones of a kind together.
	otherMappings = "[other]"
)

// list returns the mappings, the largest first. Small ones are added up, unless they are arenas.
func (t mappingTable) list() []samples.Mapping {
	merged := mappingTable{}
	for key, m := range t {
		m.Arena, m.Part = arenaOf(key.name)
		if m.Arena == "" && max(m.Resident, m.Locked) < smallMapping && key.name != "[heap]" {
			key.name = otherMappings
		}
		sum := merged[key]
		sum.Name, sum.Kind, sum.Arena, sum.Part = key.name, key.kind, m.Arena, m.Part
		if strings.HasPrefix(sum.Name, "/memfd:") {
			sum.Name = sum.Name[1:]
		}
		sum.Resident += m.Resident
		sum.Proportional += m.Proportional
		sum.Huge += m.Huge
		sum.Locked += m.Locked
		sum.Count += m.Count
		merged[key] = sum
	}
	return slices.SortedFunc(maps.Values(merged), func(a, b samples.Mapping) int {
		return cmp.Or(cmp.Compare(b.Resident, a.Resident), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Kind, b.Kind))
	})
}

// arenaOf returns the component and the dtype group of an arena from the name of its mapping, such as
// "/memfd:plimsoll/rank0/bf16/exp_avg". The component of any other mapping is empty.
func arenaOf(mapping string) (component ledger.Component, part string) {
	name, ok := strings.CutPrefix(strings.TrimPrefix(mapping, "/"), "memfd:"+arena.NamePrefix)
	if !ok {
		return "", ""
	}
	folder, base := path.Split(name)
	if folder == "" {
		return "", ""
	}
	// The first folder is the rank.
	_, part, _ = strings.Cut(strings.TrimSuffix(folder, "/"), "/")
	return ledger.Component(base), part
}

// parseNUMAMaps adds up the pages of /proc/PID/numa_maps by node, from lines such as
//
//	7f2c4e000000 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4
//
// Pages are counted in units of the line's own page size.
func parseNUMAMaps(r io.Reader) (map[int]ledger.Bytes, error) {
	nodes := map[int]ledger.Bytes{}
	lines := bufio.NewScanner(r)
	pages := map[int]int64{}
	for number := 1; lines.Scan(); number++ {
		clear(pages)
		pageSize := int64(0)
		for _, field := range strings.Fields(lines.Text()) {
			key, value, ok := strings.Cut(field, "=")
			digits, isNode := strings.CutPrefix(key, "N")
			if !ok || !isNode && key != "kernelpagesize_kB" {
				continue
			}
			count, err := strconv.ParseUint(value, 10, 32)
			if err != nil {
				return nil, fmt.Errorf("line %d: %q: expected a number of pages", number, field)
			}
			if !isNode {
				pageSize = int64(count) << 10
				continue
			}
			node, err := strconv.ParseUint(digits, 10, 16)
			if err != nil {
				return nil, fmt.Errorf("line %d: %q: expected a NUMA node", number, field)
			}
			pages[int(node)] = int64(count)
		}
		for node, count := range pages {
			if pageSize > 1<<30 || pageSize == 0 {
				return nil, fmt.Errorf("line %d: pages without a page size", number)
			}
			nodes[node] += ledger.Bytes(count * pageSize)
		}
	}
	return nodes, lines.Err()
}
