package evidence

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// usagePatterns are the outputs of programs that show limits and the use of memory and disks.
var usagePatterns = []pattern{
	{ // bash: builtins/ulimit.def
		name:       "ulimit",
		literals:   []string{", -l)", ", -v)", ", -m)", "(-u)", "(-n)", ", -d)"},
		expression: `^(?P<what>[a-z][a-z ]+?)\s+\((?:(?P<unit>kbytes|blocks|bytes), )?-(?P<flag>[lvmund])\)\s+(?P<value>\d+|unlimited)$`,
		kind:       LimitList,
		fact: func(m *match) Fact {
			unit := ledger.Bytes(1)
			if m.get("unit") == "kbytes" {
				unit = kb
			}
			names := map[string]string{
				"l": "RLIMIT_MEMLOCK", "v": "RLIMIT_AS", "m": "RLIMIT_RSS", "u": "RLIMIT_NPROC", "n": "RLIMIT_NOFILE",
				"d": "RLIMIT_DATA",
			}
			return Limit{Name: names[m.get("flag")], Bytes: m.size("value", unit)}
		},
	},
	{ // Linux: fs/proc/base.c
		name:     "/proc/PID/limits",
		literals: []string{"Max "},
		expression: `^Max (?P<what>locked memory|address space|data size|resident set|processes|open files)\s+` +
			`(?P<value>\d+|unlimited)\s+(?:\d+|unlimited)\s+(?:bytes|processes|files)?\s*$`,
		kind: LimitList,
		fact: func(m *match) Fact {
			names := map[string]string{
				"locked memory": "RLIMIT_MEMLOCK", "address space": "RLIMIT_AS", "data size": "RLIMIT_DATA",
				"resident set": "RLIMIT_RSS", "processes": "RLIMIT_NPROC", "open files": "RLIMIT_NOFILE",
			}
			return Limit{Name: names[m.get("what")], Bytes: m.size("value", 1)}
		},
	},
	{ // util-linux: sys-utils/prlimit.c
		name:       "prlimit",
		literals:   []string{"MEMLOCK ", "AS ", "NPROC "},
		expression: `^(?P<what>MEMLOCK|AS|NPROC)\s+[a-z][\w -]*?\s+(?P<value>\d+|unlimited)\s+(?:\d+|unlimited)(?: (?:bytes|processes))?\s*$`,
		kind:       LimitList,
		fact: func(m *match) Fact {
			return Limit{Name: "RLIMIT_" + m.get("what"), Bytes: m.size("value", 1)}
		},
	},
	{ // sysctl
		name:       "overcommit",
		literals:   []string{"overcommit_memory"},
		expression: `\bovercommit_memory ?[=:] ?(?P<value>[012])\b`,
		kind:       HostCounter,
		fact:       func(m *match) Fact { return Limit{Name: "overcommit", Bytes: m.size("value", 1)} },
	},
	{ // coreutils: src/df.c
		name:       "df",
		literals:   []string{"Mounted on"},
		expression: `^Filesystem\s.*?(?P<unit>1K-blocks|1024-blocks|1M-blocks|1B-blocks|Size)\s+Used\s+Avail(?:able)?\s+(?:Use%|Capacity)\s+Mounted on$`,
		kind:       DiskList,
		take: func(r *reader, m *match) {
			units := map[string]ledger.Bytes{"1B-blocks": 1, "1M-blocks": ledger.MiB}
			unit, ok := units[m.get("unit")]
			if !ok {
				unit = kb
			}
			r.begin(m.stream, &diskTable{unit})
		},
	},
	{ // procps: src/free.c
		name:       "free",
		literals:   []string{"buff/cache", "buffers "},
		expression: `^\s+total\s+used\s+free\s+shared\s+(?:buff/cache|buffers)\s+(?:available|cached|cache\s+available)$`,
		kind:       HostCounter,
		take: func(r *reader, m *match) {
			columns := strings.Fields(m.whole)
			r.begin(m.stream, &freeTable{columns: columns, at: m.text, values: map[string]int64{}})
		},
	},
	{ // procps: src/top/top.c
		name:       "top: memory",
		literals:   []string{" Mem :"},
		expression: `^(?P<unit>[KMGT])iB Mem : +(?P<total>[\d.]+) total, +(?P<free>[\d.]+) free, +[\d.]+ used, +(?P<cache>[\d.]+) buff/cache`,
		kind:       HostCounter,
		fact: func(m *match) Fact {
			bytes := func(group string) int64 { return int64(sizeOf(m.get(group)+m.get("unit"), 1).Bytes) }
			return Counters{File: "top", Values: map[string]int64{
				"MemTotal": bytes("total"), "MemFree": bytes("free"), "Cached": bytes("cache")}}
		},
	},
	{ // nvidia-smi
		name:       "nvidia-smi",
		literals:   []string{"NVIDIA-SMI"},
		expression: `^\| NVIDIA-SMI \d`,
		kind:       GPUList,
		take:       func(r *reader, m *match) { r.begin(m.stream, &gpuTable{}) },
	},
	{ // nvidia-smi --query-gpu=timestamp,index,uuid,memory.total,memory.reserved,memory.used,memory.free
		name:     "nvidia-smi in CSV without header",
		literals: []string{", GPU-"},
		expression: `^\d{4}/\d\d/\d\d [\d:.]+, (?P<dev>\d+), GPU-[\w-]+, (?P<total>\d+)(?: MiB)?, \d+(?: MiB)?, ` +
			`(?P<used>\d+)(?: MiB)?, (?P<free>\d+)(?: MiB)?$`,
		kind: GPUList,
		fact: func(m *match) Fact {
			return GPUUsage{
				Device: m.integer("dev", NoRank), Total: m.size("total", ledger.MiB), Used: m.size("used", ledger.MiB),
				Free: m.size("free", ledger.MiB),
			}
		},
	},
	{ // nvidia-smi --query-gpu, --query-compute-apps
		name:       "nvidia-smi in CSV",
		literals:   []string{"memory.", "used_memory", "used_gpu_memory"},
		expression: `^(?P<columns>[a-z_.]+(?: \[\w+\])?(?:, ?[a-z_.]+(?: \[\w+\])?)+)$`,
		kind:       GPUList,
		take: func(r *reader, m *match) {
			r.begin(m.stream, &gpuCSV{columns: strings.Split(m.get("columns"), ","),
				processes: map[string][]GPUProcess{}})
		},
	},
}

// diskTable is what df prints.
type diskTable struct{ unit ledger.Bytes }

var diskRow = lazyregexp.New(`^\S.*?\s+([\d.,]+[KMGTP]?)\s+([\d.,]+[KMGTP]?)\s+(-?[\d.,]+[KMGTP]?)\s+(?:\d+%|-)\s+(/.*)$`)

func (b *diskTable) line(r *reader, t *text) bool {
	groups := diskRow.FindStringSubmatch(t.string)
	if groups == nil {
		return false
	}
	r.kinds[DiskList]++
	r.add(t, FileSystem{
		Mount: groups[4], Size: sizeOf(groups[1], b.unit), Used: sizeOf(groups[2], b.unit),
		Free: sizeOf(groups[3], b.unit),
	})
	return true
}

func (*diskTable) end(*reader) {}

// freeTable is what free prints. Its counters have the names of /proc/meminfo.
type freeTable struct {
	columns []string
	at      text
	values  map[string]int64
}

var freeNames = map[string]string{
	"Mem: total": "MemTotal", "Mem: free": "MemFree", "Mem: available": "MemAvailable", "Mem: shared": "Shmem",
	"Mem: buff/cache": "Cached", "Swap: total": "SwapTotal", "Swap: free": "SwapFree",
}

func (b *freeTable) line(_ *reader, t *text) bool {
	fields := strings.Fields(t.string)
	if len(fields) < 2 || fields[0] != "Mem:" && fields[0] != "Swap:" {
		return false
	}
	for i, field := range fields[1:min(len(fields), len(b.columns)+1)] {
		if name := freeNames[fields[0]+" "+b.columns[i]]; name != "" {
			if size := sizeOf(field, kb); size.Known {
				b.values[name] = int64(size.Bytes)
			}
		}
	}
	return true
}

func (b *freeTable) end(r *reader) {
	if len(b.values) > 0 {
		r.add(&b.at, Counters{File: "free", Values: b.values})
	}
}

// gpuTable is the table of nvidia-smi: two lines for each GPU, and a list of processes.
type gpuTable struct {
	gpus []GPUUsage
	at   []text
}

var (
	gpuNameRow    = lazyregexp.New(`^\|\s+(\d+)\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|`)
	gpuMemoryRow  = lazyregexp.New(`\|\s+(\d+)MiB\s+/\s+(\d+)MiB\s+\|`)
	gpuProcessRow = lazyregexp.New(`^\|\s+(\d+)\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?(\d+)\s+[CGM+]+\s+\S.*?\s+(\d+)MiB\s+\|`)
)

func (b *gpuTable) line(_ *reader, t *text) bool {
	if !strings.HasPrefix(t.string, "|") && !strings.HasPrefix(t.string, "+") && strings.TrimSpace(t.string) != "" {
		return false
	}
	if g := gpuNameRow.FindStringSubmatch(t.string); g != nil && len(b.gpus) < 1024 {
		b.gpus, b.at = append(b.gpus, GPUUsage{Device: atoi(g[1]), Name: g[2]}), append(b.at, *t)
	}
	if g := gpuMemoryRow.FindStringSubmatch(t.string); g != nil && len(b.gpus) > 0 {
		last := &b.gpus[len(b.gpus)-1]
		last.Used, last.Total = sizeOf(g[1], ledger.MiB), sizeOf(g[2], ledger.MiB)
		last.Free = Size{Bytes: last.Total.Bytes - last.Used.Bytes, Known: true}
	}
	if g := gpuProcessRow.FindStringSubmatch(t.string); g != nil {
		for i := range b.gpus {
			if gpu := &b.gpus[i]; gpu.Device == atoi(g[1]) && len(gpu.Processes) < 1024 {
				gpu.Processes = append(gpu.Processes, GPUProcess{PID: atoi(g[2]), Used: sizeOf(g[3], ledger.MiB)})
			}
		}
	}
	return true
}

func (b *gpuTable) end(r *reader) {
	for i, gpu := range b.gpus {
		r.kinds[GPUList] += 2
		r.add(&b.at[i], gpu)
	}
}

// gpuCSV is what nvidia-smi prints for a query, with a header.
type gpuCSV struct {
	columns   []string
	rows      int
	processes map[string][]GPUProcess
}

func (b *gpuCSV) line(r *reader, t *text) bool {
	values := strings.Split(t.string, ",")
	if len(values) != len(b.columns) || b.rows >= 4096 {
		return false
	}
	b.rows++
	f := GPUUsage{Device: NoRank}
	process := GPUProcess{}
	for i, column := range b.columns {
		name, unit, _ := strings.Cut(strings.TrimSpace(column), " ")
		value := strings.TrimSpace(values[i])
		size := sizeOf(value, ledger.MiB)
		if unit == "[GiB]" {
			size = sizeOf(value, ledger.GiB)
		}
		switch name {
		case "index":
			f.Device = atoi(value)
		case "name", "gpu_name":
			f.Name = value
		case "memory.total":
			f.Total = size
		case "memory.used":
			f.Used = size
		case "memory.free":
			f.Free = size
		case "pid":
			process.PID = atoi(value)
		case "used_memory", "used_gpu_memory":
			process.Used = size
		}
	}
	if process.PID > 0 {
		f.Processes = []GPUProcess{process}
	}
	r.kinds[GPUList]++
	r.add(t, f)
	return true
}

func (*gpuCSV) end(*reader) {}
