package evidence

import (
	"cmp"
	"slices"
	"strings"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
)

// kernelLog is what one writer of a kernel log has said of the kill that is going on.
type kernelLog struct {
	kill    *KernelKill
	at      text // its last line that says what was killed, or its first line
	table   []kernelRow
	header  []string     // the columns of the table after the PID
	names   bool         // the last column has the names; a pager may have cut it off
	page    ledger.Bytes // 0 if unknown
	slab    int64        // pages of the kernel's own that it cannot free
	decided bool         // the kernel has said which process it kills
	proven  bool         // a line comes from the OOM killer, and not from a failed allocation
	named   string       // the cgroup that is killed as a whole
	before  *KernelKill
	last    int // the index of its finding
}

// proof returns the kill that is going on, at a line that only the OOM killer prints.
func (k *kernelLog) proof(m *match) *KernelKill {
	k.proven = true
	return k.begun(m)
}

// kernelRow is a row of the table of processes, in pages.
type kernelRow struct {
	pid    int
	name   string
	values map[string]int64
}

const kb = ledger.KiB

// kernelPatterns are in mm/oom_kill.c, mm/memcontrol.c and mm/show_mem.c of Linux.
var kernelPatterns = []pattern{
	{ // dump_header
		name:     "oom-killer invoked",
		literals: []string{"invoked oom-killer"},
		expression: `(?P<trig>\S.*?) invoked oom-killer:(?: gfp_mask=(?P<gfp>0x[0-9a-f]+)(?:\((?P<flags>[^)]*)\))?,` +
			`(?: nodemask=(?P<nm>[^, ]+(?:,\d[^, ]*)*),)? +order=(?P<order>-?\d+), oom_score_adj=(?P<adj>-?\d+))?`,
		kind: KernelLog,
		take: func(r *reader, m *match) {
			k := r.kernel(m)
			k.end(r)
			k.kill = &KernelKill{
				Trigger: m.get("trig"), Flags: m.get("flags"), Order: m.integer("order", 0), NodeMask: m.get("nm"),
			}
			if k.kill.Flags == "" {
				k.kill.Flags = m.get("gfp")
			}
			k.at, k.proven = m.text, true
		},
	},
	{ // cpuset_print_current_mems_allowed
		name:       "cpuset of the trigger",
		literals:   []string{"mems_allowed="},
		expression: `^\S.* cpuset=(?P<cs>\S+) mems_allowed=(?P<ma>[\d,-]+)$`,
		kind:       KernelLog,
		take:       func(r *reader, m *match) { r.kernel(m).begun(m).MemsAllowed = m.get("ma") },
	},
	{ // mem_cgroup_print_oom_meminfo
		name:       "memory of a cgroup",
		literals:   []string{"memory: usage"},
		expression: `^\s*memory: usage (?P<use>\d+)kB, limit (?P<lim>\d+)kB, failcnt (?P<fc>\d+)`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			kill := r.kernel(m).proof(m)
			kill.Usage, kill.Limit = m.size("use", kb), m.size("lim", kb)
			if kill.Constraint == "" {
				kill.Constraint = "CONSTRAINT_MEMCG"
			}
		},
	},
	{ // mem_cgroup_print_oom_info up to 4.x
		name:       "task killed for its cgroup",
		literals:   []string{"killed as a result of limit of"},
		expression: `Task in (?P<tcg>\S+) killed as a result of limit of (?P<ocg>\S+)`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			kill := r.kernel(m).proof(m)
			kill.TaskGroup, kill.Group, kill.Constraint = m.get("tcg"), m.get("ocg"), "CONSTRAINT_MEMCG"
		},
	},
	{ // mem_cgroup_print_oom_meminfo: bytes on the next lines (version 2), or kB on the same one (version 1)
		name:       "statistics of a cgroup",
		literals:   []string{"Memory cgroup stats for"},
		expression: `Memory cgroup stats for (?P<cg>[^\s:]*):?(?P<rest>.*)`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			kill := r.kernel(m).proof(m)
			if kill.Group == "" {
				kill.Group = m.get("cg")
			}
			if kill.Constraint == "" {
				kill.Constraint = "CONSTRAINT_MEMCG"
			}
			for _, pair := range statistic.FindAllStringSubmatch(m.get("rest"), -1) {
				kill.stats()[pair[1]] += sizeOf(pair[2], kb).Bytes
			}
			r.begin(m.stream, &statistics{kill})
		},
	},
	{ // show_mem: the zones of the nodes
		name:       "zone of a node",
		literals:   []string{" free:"},
		expression: `^Node (?P<node>\d+) (?P<zone>\w+) free:(?P<free>\d+)kB .*?(?:present:(?P<present>\d+)kB(?: managed:(?P<managed>\d+)kB)?|$)`,
		kind:       KernelLog, take: takeZone,
	},
	{ // show_mem: the free blocks of a zone, from one page on
		name:       "free blocks of a zone",
		literals:   []string{"*4kB", "*16kB", "*64kB"},
		expression: `^Node \d+ \w+: \d+\*(?P<page>4|16|64)kB `,
		kind:       KernelLog,
		take:       func(r *reader, m *match) { r.kernel(m).page = m.size("page", kb).Bytes },
	},
	{ // hugetlb_show_meminfo: pages that are set apart for those who ask for huge ones
		name:       "huge pages of a node",
		literals:   []string{"hugepages_total="},
		expression: `^Node \d+ hugepages_total=(?P<total>\d+) hugepages_free=(?P<free>\d+) .*hugepages_size=(?P<size>\d+kB)`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			stats, size := r.kernel(m).begun(m).stats(), m.size("size", kb).Bytes
			stats[HugePages] += ledger.Bytes(m.integer("total", 0)) * size
			stats[FreeHugePages] += ledger.Bytes(m.integer("free", 0)) * size
		},
	},
	{ // show_mem: the whole host, in pages
		name:       "slab of the kernel",
		literals:   []string{" slab_unreclaimable:"},
		expression: ` slab_unreclaimable:(?P<pages>\d+)(?: |$)`,
		kind:       KernelLog,
		take:       func(r *reader, m *match) { r.kernel(m).slab = int64(m.integer("pages", 0)) },
	},
	{ // show_mem: the nodes
		name:       "memory of a node",
		literals:   []string{" active_anon:"},
		expression: `^Node (?P<node>\d+) (?P<rest>active_anon:\d+kB .*)`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			stats := r.kernel(m).begun(m).stats()
			for _, pair := range statistic.FindAllStringSubmatch(m.get("rest"), -1) {
				stats[pair[1]] += sizeOf(pair[2], kb).Bytes
			}
		},
	},
	{ // dump_tasks
		name:       "table of processes",
		literals:   []string{"total_vm"},
		expression: `^\s*\[\s*pid\s*\](?P<columns>.*total_vm.*?)(?P<name>name)?\s*$`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			k := r.kernel(m)
			k.proof(m)
			k.header, k.table, k.names = strings.Fields(m.get("columns")), nil, m.get("name") != ""
			r.begin(m.stream, &processTable{k})
		},
	},
	{ // dump_header since 5.0
		name:     "why",
		literals: []string{"constraint=CONSTRAINT_"},
		expression: `oom-kill: ?constraint=(?P<c>CONSTRAINT_\w+)(?:, ?nodemask=(?P<nm>[^,]+(?:,\d[\d-]*)*))?` +
			`(?:, ?cpuset=(?P<cs>[^,]+))?(?:, ?mems_allowed=(?P<ma>[\d-]+(?:,\d[\d-]*)*))?(?P<global>, ?global_oom)?` +
			`(?:, ?oom_memcg=(?P<ocg>[^,]+))?(?:, ?task_memcg=(?P<tcg>[^,]+))?` +
			`(?:, ?task=(?P<task>.+?))?(?:, ?pid=(?P<pid>\d+))?(?:, ?uid=(?P<uid>\d+))?(?:\.\.\.)?\s*$`,
		kind: KernelLog,
		take: func(r *reader, m *match) {
			k := r.kernel(m)
			if k.decided { // a kill of which the log has only this line
				k.end(r)
			}
			kill := k.proof(m)
			kill.Constraint, kill.NodeMask, kill.MemsAllowed = m.get("c"), m.get("nm"), m.get("ma")
			kill.Group, kill.TaskGroup = m.get("ocg"), m.get("tcg")
			kill.Name, kill.PID = m.get("task"), m.integer("pid", 0)
			k.at, k.decided = m.text, true
			if !strings.HasSuffix(kill.Constraint, "_NONE") {
				r.add(&m.text, KernelReason{Constraint: kill.Constraint})
			}
		},
	},
	{ // __oom_kill_process; before 5.0 after the line of oom_kill_process, and without what ran out
		name:     "killed process",
		literals: []string{"Killed process"},
		expression: `(?:(?P<scope>Memory cgroup out of memory|Cgroup mem(?:sw)? limit exceeded|` + // PBS repeats the kernel
			`Out of memory(?: \(oom_kill_allocating_task\))?): )?` +
			`Killed process (?P<pid>\d+)(?: \((?P<comm>.*?)\))?,?(?: UID:? ?\d+,?)? total-vm:(?P<vm>\d+)kB` +
			`(?:,? anon-rss:(?P<anon>\d+)kB)?(?:,? file-rss:(?P<file>\d+)kB)?(?:,? shmem-rss:(?P<shmem>\d+)kB)?` +
			`(?:, UID:(?P<uid>\d+) pgtables:(?P<pgt>\d+)(?P<pgtunit>kB)? oom_score_adj:(?P<adj>-?\d+))?`,
		kind: KernelLog, take: takeKilled,
	},
	{ // the same, where a terminal or a person has broken the line
		name:     "killed process, cut",
		literals: []string{"out of memory: Killed process"},
		expression: `(?P<scope>Memory cgroup out of memory|Out of memory): Killed process (?P<pid>\d+)` +
			`(?: \((?P<comm>[^)]*)\))?`,
		kind: KernelLog, take: takeKilled,
	},
	{ // oom_kill_process before 5.0
		name:       "kill process",
		literals:   []string{"Kill process"},
		expression: `(?P<scope>Memory cgroup out of memory|Out of memory): Kill process (?P<pid>\d+) \((?P<comm>.*)\) score (?P<score>\d+) or sacrifice child`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			k := r.kernel(m)
			if k.decided {
				k.end(r)
			}
			kill := k.proof(m)
			kill.PID, kill.Name, kill.Score = m.integer("pid", 0), m.get("comm"), m.integer("score", 0)
			k.scope(m)
			k.at, k.decided = m.text, true
		},
	},
	{ // oom_kill_process
		name:       "whole cgroup killed",
		literals:   []string{"are going to be killed due to memory.oom.group set"},
		expression: `Tasks in (?P<cg>\S+) are going to be killed due to memory\.oom\.group set`,
		kind:       KernelLog,
		take: func(r *reader, m *match) {
			k := r.kernel(m)
			k.named = m.get("cg")
			if k.last < len(r.source.Findings) && k.before != nil {
				if kill, ok := r.source.Findings[k.last].Fact.(KernelKill); ok {
					kill.WholeGroup = true
					r.source.Findings[k.last].Fact = kill
				}
			}
		},
	},
	{ // oom_reap_task_mm
		name:     "reaped process",
		literals: []string{"oom_reaper: reaped process"},
		expression: `oom_reaper: reaped process (?P<pid>\d+) \((?P<comm>.*)\),? now anon-rss:(?P<anon>\d+)kB, ` +
			`file-rss:(?P<file>\d+)kB, shmem-rss:(?P<shmem>\d+)kB`,
		kind: KernelLog,
		take: func(r *reader, m *match) {
			pid := m.integer("pid", 0)
			k := r.kernel(m)
			if !r.killed[pid] && (k.kill == nil || k.kill.PID != pid) {
				r.emit(m, KernelKill{PID: pid, Name: m.get("comm")})
			}
		},
	},
	{ // mm/util.c: __vm_enough_memory
		name:       "overcommit refused",
		literals:   []string{"__vm_enough_memory:"},
		expression: `__vm_enough_memory: pid: (?P<pid>\d+), comm: (?P<comm>.*?), (?:bytes: (?P<req>\d+) )?(?:no|not) enough memory`,
		kind:       KernelLog,
		fact: func(m *match) Fact {
			by := m.get("comm") + " (overcommit)"
			return HostAllocationFailed{By: by, Requested: m.size("req", 1), Errno: enomem}
		},
	},
	{ // macOS: xnu's bsd/kern/kern_memorystatus.c
		name:     "macOS killed a process",
		literals: []string{"low swap: killing", "memorystatus: killing_"},
		expression: `low swap: killing largest compressed process with pid (?P<pid>\d+) \((?P<comm>[^)]*)\)|` +
			`memorystatus: killing_\w+ pid (?P<pid2>\d+) \[(?P<comm2>[^\]]*)\] \((?P<why>[\w-]+)`,
		kind: KernelLog,
		fact: func(m *match) Fact {
			kill := KernelKill{PID: m.integer("pid", m.integer("pid2", 0)), Name: m.get("comm") + m.get("comm2"),
				Constraint: "CONSTRAINT_NONE"}
			if m.get("why") == "per-process-limit" {
				kill.Constraint = "CONSTRAINT_MEMCG"
			}
			return kill
		},
	},
	{ // kernel/cgroup/pids.c
		name:       "fork rejected",
		literals:   []string{"fork rejected by pids controller"},
		expression: `cgroup: fork rejected by pids controller in (?P<cg>\S+)`,
		kind:       KernelLog,
		fact:       func(m *match) Fact { return TooManyProcesses{By: "fork", Group: m.get("cg")} },
	},
	{ // arch/x86/mm/fault.c, arch/arm64/mm/fault.c
		name:       "segmentation fault",
		literals:   []string{"]: segfault at"},
		expression: `^\S.*\[(?P<pid>\d+)\]: segfault at`,
		kind:       KernelLog,
		fact: func(m *match) Fact {
			f := endOf("the kernel", -SIGSEGV)
			f.PID = m.integer("pid", 0)
			return f
		},
	},
	{ // mm/memory-failure.c
		name:       "memory hardware failed",
		literals:   []string{"due to hardware memory corruption"},
		expression: `Memory failure: \S+ Sending SIGBUS to (?P<comm>.*):(?P<pid>\d+) due to hardware memory corruption`,
		kind:       KernelLog,
		fact:       func(m *match) Fact { return HardwareFailed{m.integer("pid", 0), m.get("comm")} },
	},
	{ // the NVIDIA driver
		name:       "Xid",
		literals:   []string{"NVRM: "},
		expression: `NVRM: (?:Xid \([^)]*\): (?P<xid>\d+)|.*(?P<lost>fallen off the bus|RmInitAdapter failed))`,
		kind:       KernelLog,
		fact: func(m *match) Fact {
			status := m.get("lost")
			if status == "" {
				status = "Xid " + m.get("xid")
			}
			return LibraryFailed{Library: "the NVIDIA driver", Status: status}
		},
	},
	{ // nvidia-smi
		name:     "the driver has lost a GPU",
		literals: []string{"Unable to determine the device handle for ", "GPU is lost"},
		expression: `(?P<lost>Unable to determine the device handle for (?:GPU ?|gpu )\S+: (?:Unknown Error|GPU is lost)|` +
			`\bGPU is lost)`,
		kind: GPUList,
		fact: func(m *match) Fact { return LibraryFailed{Library: "the NVIDIA driver", Status: m.get("lost")} },
	},
	{ // out_of_memory
		name:       "panic",
		literals:   []string{"System is deadlocked on memory", "Out of memory and no killable processes"},
		expression: `(?:System is deadlocked on memory|Out of memory and no killable processes)`,
		kind:       KernelLog,
		fact:       func(*match) Fact { return KernelKill{Constraint: "CONSTRAINT_NONE"} },
	},
}

var statistic = lazyregexp.New(`([a-z]\w*):(\d+[KkMG]?B)`)

// kernel returns the kernel log that the line belongs to.
func (r *reader) kernel(m *match) *kernelLog {
	k := r.kernels[m.text.stream]
	if k == nil {
		k = &kernelLog{}
		r.kernels[m.text.stream] = k
	}
	return k
}

// begun returns the kill that is going on. A log that is cut begins in the middle of one.
func (k *kernelLog) begun(m *match) *KernelKill {
	if k.kill == nil {
		k.kill = &KernelKill{}
		k.at = m.text
	}
	return k.kill
}

// stats returns the statistics of the kill, to add to.
func (kill *KernelKill) stats() map[string]ledger.Bytes {
	if kill.Stats == nil {
		kill.Stats = map[string]ledger.Bytes{}
	}
	return kill.Stats
}

// scope takes which memory ran out, where no other line has said so.
func (k *kernelLog) scope(m *match) {
	if k.kill.Constraint == "" && strings.Contains(m.get("scope"), "group ") {
		k.kill.Constraint = "CONSTRAINT_MEMCG"
	}
}

func takeZone(r *reader, m *match) {
	kill := r.kernel(m).begun(m)
	number := m.integer("node", 0)
	i := slices.IndexFunc(kill.Nodes, func(n NUMANode) bool { return n.Node == number })
	if i < 0 {
		if i = len(kill.Nodes); i > 1024 {
			return
		}
		kill.Nodes = append(kill.Nodes, NUMANode{Node: number})
	}
	n := &kill.Nodes[i]
	size := m.size("managed", kb)
	if !size.Known {
		size = m.size("present", kb)
	}
	n.Free = Size{Bytes: n.Free.Bytes + m.size("free", kb).Bytes, Known: true}
	n.Size = Size{Bytes: n.Size.Bytes + size.Bytes, Known: size.Known}
}

func takeKilled(r *reader, m *match) {
	k := r.kernel(m)
	pid := m.integer("pid", 0)
	if k.decided && k.kill.PID != 0 && k.kill.PID != pid {
		k.end(r)
	}
	if k.kill == nil && k.named != "" && k.before != nil { // another process of a cgroup that is killed as a whole
		same := *k.before
		k.kill = &same
	}
	kill := k.proof(m)
	k.scope(m)
	kill.PID = pid
	if name := m.get("comm"); name != "" {
		kill.Name = name
	}
	kill.VirtualSize, kill.Anonymous = m.size("vm", kb), m.size("anon", kb)
	kill.File, kill.Shared = m.size("file", kb), m.size("shmem", kb)
	kill.PageTables = m.size("pgt", 1)
	if m.get("pgtunit") != "" {
		kill.PageTables = m.size("pgt", kb)
	}
	kill.Score = m.integer("adj", kill.Score)
	kill.WholeGroup = k.named != ""
	k.at, k.decided = m.text, true
	k.end(r)
}

// end adds the kill that is going on to the findings.
func (k *kernelLog) end(r *reader) {
	kill := k.kill
	if kill == nil {
		return
	}
	page := k.pageOf(kill)
	if r.rows += len(k.table); r.rows <= mostRows {
		kill.Processes = k.processes(page)
	}
	if k.slab > 0 {
		kill.stats()["slab_unreclaimable"] = ledger.Bytes(k.slab) * page
	}
	if k.proven {
		k.before, k.last = kill, len(r.source.Findings)
		r.add(&k.at, *kill)
		r.killed[kill.PID] = true
	}
	k.kill, k.table, k.slab, k.decided, k.proven = nil, nil, 0, false, false
	if !kill.WholeGroup {
		k.named = ""
	}
}

// statistics are those of a cgroup of version 2, one a line.
type statistics struct{ kill *KernelKill }

var statisticLine = lazyregexp.New(`^\s*([a-z]\w*) (\d+)$`)

func (b *statistics) line(_ *reader, t *text) bool {
	groups := statisticLine.FindStringSubmatch(t.string)
	if groups == nil || len(b.kill.Stats) > 1000 {
		return false
	}
	b.kill.stats()[groups[1]] = sizeOf(groups[2], 1).Bytes
	return true
}

func (*statistics) end(*reader) {}

// processTable is the kernel's table of processes.
type processTable struct{ log *kernelLog }

var processRow = lazyregexp.New(`^\s*\[\s*(?P<pid>\d+)\]\s+(?P<rest>\d.*)$`)

// mostRows bounds the memory of all tables.
const mostRows = 100_000

func (b *processTable) line(_ *reader, t *text) bool {
	groups := processRow.FindStringSubmatch(t.string)
	if groups == nil || len(b.log.table) >= mostRows {
		return false
	}
	row := kernelRow{pid: atoi(groups[1]), values: make(map[string]int64, len(b.log.header))}
	rest := groups[2]
	for _, column := range b.log.header {
		value, after, _ := strings.Cut(strings.TrimLeft(rest, " \t"), " ")
		row.values[column] = int64(atoi(value))
		rest = after
	}
	if b.log.names {
		row.name = strings.TrimSpace(rest)
	}
	b.log.table = append(b.log.table, row)
	return true
}

func (*processTable) end(*reader) {}

// pageOf returns the size of the kernel's pages. The list of free blocks begins with one of a page's size, and the row
// of the killed process shows the size, as the kernel also prints its virtual size in kB.
func (k *kernelLog) pageOf(kill *KernelKill) ledger.Bytes {
	page := cmp.Or(k.page, pageSize)
	for _, row := range k.table {
		if row.pid != kill.PID || row.values["total_vm"] == 0 {
			continue
		}
		size := kill.VirtualSize.Bytes / ledger.Bytes(row.values["total_vm"])
		if size >= 2048 && size <= 1<<18 && size&(size-1) == 0 {
			page = size
		}
	}
	return page
}

// processes returns the table in bytes. Its numbers are pages.
func (k *kernelLog) processes(page ledger.Bytes) []KernelProcess {
	if len(k.table) == 0 {
		return nil
	}
	list := make([]KernelProcess, len(k.table))
	for i, row := range k.table {
		bytes := func(column string) ledger.Bytes { return ledger.Bytes(row.values[column]) * page }
		list[i] = KernelProcess{
			PID: row.pid, Name: row.name, Resident: bytes("rss"), Anonymous: bytes("rss_anon"), File: bytes("rss_file"),
			Shared: bytes("rss_shmem"), Swap: bytes("swapents"), Score: int(row.values["oom_score_adj"]),
		}
	}
	return list
}
