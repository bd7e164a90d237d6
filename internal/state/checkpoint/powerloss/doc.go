// Package powerloss tests that a loss of power leaves no half checkpoint, and takes none away that was complete.
//
// Its tests mount a file system of their own and save into it with the code that everybody runs. The file system
// records each operation that reaches it. A loss of power is then made after every single one of them, many times:
// names and data that were brought to the disk (fsync) are there, others are dropped, torn or reordered. What is left
// is laid out in a folder, and read again.
//
// The file system keeps no promise that POSIX does not make. The fsync of a file says nothing of its name. That of a
// folder says nothing of the data of its files. Names of different folders reach the disk in any order. Those of one
// folder reach it in their order, as with a journal.
package powerloss
