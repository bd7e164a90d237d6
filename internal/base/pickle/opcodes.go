// Package pickle reads and writes pickles of torch.save: tensors, numbers and texts in dicts, lists and tuples. It runs
// no code of a document.
package pickle

// The opcodes of pickle, by the names of Python's pickletools.
const (
	OpProto           = 0x80
	OpStop            = '.'
	OpFrame           = 0x95
	OpMark            = '('
	OpEmptyDict       = '}'
	OpEmptyList       = ']'
	OpEmptyTuple      = ')'
	OpTuple           = 't'
	OpTuple1          = 0x85
	OpTuple2          = 0x86
	OpTuple3          = 0x87
	OpSetItem         = 's'
	OpSetItems        = 'u'
	OpAppend          = 'a'
	OpAppends         = 'e'
	OpBinInt          = 'J'
	OpBinInt1         = 'K'
	OpBinInt2         = 'M'
	OpLong1           = 0x8a
	OpLong4           = 0x8b
	OpBinFloat        = 'G'
	OpNone            = 'N'
	OpNewTrue         = 0x88
	OpNewFalse        = 0x89
	OpShortBinUnicode = 0x8c
	OpBinUnicode      = 'X'
	OpBinUnicode8     = 0x8d
	OpShortBinString  = 'U'
	OpBinString       = 'T'
	OpBinPut          = 'q'
	OpLongBinPut      = 'r'
	OpMemoize         = 0x94
	OpBinGet          = 'h'
	OpLongBinGet      = 'j'
	OpGlobal          = 'c'
	OpStackGlobal     = 0x93
	OpReduce          = 'R'
	OpNewObj          = 0x81
	OpBuild           = 'b'
	OpBinPersID       = 'Q'
)
