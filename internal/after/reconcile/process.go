package reconcile

import (
	"regexp"
	"strconv"
	"time"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// identity tells processes apart: the kernel uses PIDs again.
type identity struct {
	PID       int
	StartTime uint64
}

// divided is how much of its resident pages a process has by its proportional size, by kind. The kernel walks all pages
// for it, so it is read less often than the resident size.
type divided struct{ anonymous, shared, file, hugetlb float64 }

// newDivided returns the shares of a reading. Both sizes are not of the same instant, so small differences are no
// sharing.
func newDivided(p *process) divided {
	share := func(proportional, resident ledger.Bytes) float64 {
		if s := float64(proportional) / float64(resident); s > 0 && s < 0.9 {
			return s
		}
		return 1
	}
	r, d := p.Resident, p.Proportional
	return divided{share(d.Anonymous, r.Anonymous), share(d.Shared, r.Shared), share(d.File, r.File),
		share(d.Hugetlb, r.Hugetlb)}
}

// of returns the proportional size at a later sample.
func (d divided) of(r samples.Kinds) samples.Kinds {
	part := func(share float64, b ledger.Bytes) ledger.Bytes {
		if share >= 1 {
			return b
		}
		return ledger.Bytes(share * float64(b))
	}
	return samples.Kinds{Anonymous: part(d.anonymous, r.Anonymous), Shared: part(d.shared, r.Shared),
		File: part(d.file, r.File), Hugetlb: part(d.hugetlb, r.Hugetlb)}
}

// divide replaces the proportional size of every process by that of the sample's time. Only processes that have forked
// share anonymous memory.
func (r *Recording) divide() {
	known, read := map[identity]divided{}, map[identity]time.Duration{}
	for i := range r.Samples {
		list := r.Samples[i].Processes
		forked := map[int]bool{} // ranks with children
		for k := range list {
			forked[list[k].Rank] = forked[list[k].Rank] || list[k].Role == samples.Child
		}
		for k := range list {
			p, id := &list[k], list[k].identity
			at := r.Samples[i].Time - p.ProportionalAge
			if before, any := read[id]; p.ProportionalAge >= 0 && (!any || at > before) {
				known[id], read[id] = newDivided(p), at
			}
			shares, any := known[id]
			if !any {
				shares = divided{1, 1, 1, 1}
			}
			if !forked[p.Rank] {
				shares.anonymous = 1
			}
			p.Proportional = shares.of(p.Resident)
		}
	}
}

// maps is what the last reading of a process's mappings has found. Samples in between have only the sums.
type maps struct {
	program pages // of the program and its libraries
	files   pages // of other files: page cache
	arenas  []arena
}

// pages are the sizes of file pages.
type pages struct{ resident, proportional ledger.Bytes }

func (p *pages) add(m samples.Mapping) {
	p.resident += m.Resident
	p.proportional += m.Proportional
}

// arena is the proportional size of an arena of ours in one process. Plans do not tell dtype groups apart.
type arena struct {
	rank      int
	component ledger.Component
	bytes     ledger.Bytes
}

var (
	// ofProgram matches the files that are the program itself.
	ofProgram   = regexp.MustCompile(`\.so(\.|$| )|/s?bin/|/lib(64|32)?/`)
	rankInArena = regexp.MustCompile(`/rank(\d{1,9})/`)
)

// newMaps returns what the mappings of a process hold.
func newMaps(p *process) *maps {
	m := &maps{}
	for _, mapping := range p.Mappings {
		switch {
		case mapping.Arena != "":
			a := arena{p.Rank, mapping.Arena, mapping.Proportional}
			if named := rankInArena.FindStringSubmatch(mapping.Name); named != nil {
				a.rank, _ = strconv.Atoi(named[1])
			}
			m.arenas = append(m.arenas, a)
		case mapping.Kind != samples.FileMapping:
		case ofProgram.MatchString(mapping.Name):
			m.program.add(mapping)
		default:
			m.files.add(mapping)
		}
	}
	return m
}

// held is the memory that a process needs, by kind, and the page cache that it does not.
type held struct {
	anonymous, shared, hugetlb ledger.Bytes // anonymous includes what was swapped out
	program                    ledger.Bytes // file pages of the program and its libraries
	pageTables                 ledger.Bytes
	pageCache                  ledger.Bytes // of other files; the kernel takes it back
	resident                   ledger.Bytes // as the kernel counts it for a single process
	programResident            ledger.Bytes
}

// heldBy returns what a process holds. File pages are its program's in the proportion of the last reading of its
// mappings; without one, all are.
func heldBy(p *process, m *maps) held {
	h := held{
		anonymous: p.Proportional.Anonymous + p.Swap, shared: p.Proportional.Shared, hugetlb: p.Proportional.Hugetlb,
		program: p.Proportional.File, pageTables: p.PageTables, resident: p.Resident.Sum(),
		programResident: p.Resident.File,
	}
	if m != nil {
		part := func(program, files, now ledger.Bytes) ledger.Bytes {
			if files <= 0 || program < 0 {
				return now
			}
			return ledger.Bytes(float64(now) * (float64(program) / float64(program+files)))
		}
		h.program = part(m.program.proportional, m.files.proportional, p.Proportional.File)
		h.programResident = part(m.program.resident, m.files.resident, p.Resident.File)
		h.pageCache = p.Proportional.File - h.program
	}
	return h
}

// need returns the bytes that the job needs.
func (h held) need() ledger.Bytes {
	return h.anonymous + h.shared + h.hugetlb + h.program + h.pageTables
}

func (h held) plus(o held) held {
	return held{h.anonymous + o.anonymous, h.shared + o.shared, h.hugetlb + o.hugetlb, h.program + o.program,
		h.pageTables + o.pageTables, h.pageCache + o.pageCache, h.resident + o.resident,
		h.programResident + o.programResident}
}
