package evidence

// tables are all patterns. Of several in a line, the first counts.
var tables = [][]pattern{
	kernelPatterns, frameworkPatterns, gpuPatterns, hostPatterns, batchPatterns, slurmPatterns,
	launcherPatterns, shellPatterns, counterPatterns, usagePatterns, poolPatterns, listingPatterns,
	containerPatterns, modelPatterns, progressPatterns, missingPatterns, exceptionPatterns,
	settingPatterns, handledPatterns,
	signPatterns,
}

// firstSign is the place of the table of signs, the last one.
var firstSign = len(tables) - 1
