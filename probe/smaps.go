// Package probe measures the memory that processes really use, by mapping and by name, from /proc.
package probe

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"

	"plimsoll/ledger"
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
	var m Memory
	err := read(root, "proc/"+pid+"/smaps", func(r io.Reader) (err error) {
		m.Mappings, err = parseSmaps(r)
		return err
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

// parseSmaps reads the text of /proc/PID/smaps. Its layout is in the kernel's
// Documentation/filesystems/proc.rst. A mapping starts with a line
//
//	7f2c00000000-7f2c40000000 rw-s 00000000 00:01 1031  /memfd:name (deleted)
//
// and lines "Key: number kB" follow. Prometheus' procfs reads smaps_rollup
// only, which has no names.
func parseSmaps(r io.Reader) (map[string]Mapping, error) {
	mappings := map[string]Mapping{}
	current, started := Mapping{}, false
	flush := func() {
		if started {
			sum := mappings[current.Name]
			sum.Name = current.Name
			sum.Proportional += current.Proportional
			sum.Resident += current.Resident
			sum.Huge += current.Huge
			mappings[current.Name] = sum
		}
	}
	lines := bufio.NewScanner(r)
	for number := 1; lines.Scan(); number++ {
		line := lines.Text()
		key, rest, isField := strings.Cut(line, ":")
		if !isField || strings.ContainsAny(key, " -") {
			name, ok := mappingName(line)
			if !ok {
				return nil, fmt.Errorf("line %d: %q is neither a mapping nor a field of one", number, line)
			}
			flush()
			current, started = Mapping{Name: name}, true
			continue
		}
		if !started {
			return nil, fmt.Errorf("line %d: a field before the first mapping", number)
		}
		size, isSize, err := parseKilobytes(rest)
		if err != nil {
			return nil, fmt.Errorf("line %d: %s: %w", number, key, err)
		}
		if !isSize {
			continue // VmFlags, THPeligible and the like
		}
		switch key {
		case "Rss":
			current.Resident += size
		case "Pss":
			current.Proportional += size
		case "Shared_Hugetlb", "Private_Hugetlb":
			current.Resident += size
			current.Proportional += size
			current.Huge += size
		case "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped":
			current.Huge += size
		}
	}
	flush()
	return mappings, lines.Err()
}

// mappingName returns the name in the first line of a mapping. The kernel appends " (deleted)" to files without a
// directory entry, which all memfds are.
func mappingName(line string) (string, bool) {
	fields := strings.Fields(line)
	if len(fields) < 5 || !strings.Contains(fields[0], "-") {
		return "", false
	}
	if len(fields) == 5 {
		return "", true
	}
	// The name follows the inode and may contain spaces.
	for range 5 {
		line = strings.TrimLeft(line, " ")
		line = line[strings.IndexByte(line, ' ')+1:]
	}
	return strings.TrimSuffix(strings.TrimLeft(line, " "), " (deleted)"), true
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
